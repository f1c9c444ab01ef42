"""A regular file read at positions (no mapping: a file that shrinks is an error, not a SIGBUS)."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from pyruntime.errors import GGUFError, reason

_PATH_SHOWN = 1000
_NAME_SHOWN = 200


def shown(text: str, limit: int = _NAME_SHOWN) -> str:
    """`text` for a message: unprintable characters escaped, the middle left out beyond `limit`."""
    if not text.isprintable():
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text if len(text) <= limit else f"{text[: limit // 2]}…{text[-limit // 2 :]}"


class Source:
    """An open regular file. Reads are positioned, so any number of threads may read at once."""

    def __init__(self, path: Path) -> None:
        """Open `path`, never waiting. Raises GGUFError if it is missing or no regular file."""
        self.path = path
        self._fd = -1
        try:
            # O_NONBLOCK: opening a FIFO that nobody writes to would otherwise wait for ever.
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
            status = os.fstat(self._fd)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            raise self.error(f"cannot be opened: {reason(error)}") from error
        if not stat.S_ISREG(status.st_mode):
            self.close()
            kind = "a directory" if stat.S_ISDIR(status.st_mode) else "a pipe, socket or device"
            raise self.error(f"is {kind}, not a file")
        self.size = status.st_size

    def where(self, at: int | None = None, item: str = "") -> str:
        """How every message begins: file, byte offset, key or tensor."""
        offset = "" if at is None else f"byte {at}"
        return ": ".join(filter(None, (shown(str(self.path), _PATH_SHOWN), offset, item)))

    def error(self, problem: str, at: int | None = None, item: str = "") -> GGUFError:
        return GGUFError(f"{self.where(at, item)}: {problem}")

    def read_into(self, offset: int, out: memoryview, item: str = "") -> None:
        """Fill the bytes `out` from `offset` on. Raises GGUFError if that fails in any way."""
        done = 0
        while done < len(out):
            if self._fd < 0:
                raise self.error("the file is closed", item=item)
            try:
                count = os.preadv(self._fd, [out[done:]], offset + done)
            except OSError as error:
                problem = f"cannot be read: {reason(error)}"
                raise self.error(problem, offset + done, item) from error
            if count == 0:
                problem = (
                    f"{len(out) - done} bytes are gone: the file was longer when it was opened"
                )
                raise self.error(problem, offset + done, item)
            done += count

    def close(self) -> None:
        """Close the file; closing twice is allowed."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
