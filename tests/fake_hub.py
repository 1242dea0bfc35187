"""The model hub's HTTP API as far as downloads use it, serving folders from this machine."""

import contextlib
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"
WEIGHTS = (".safetensors", ".gguf")
Answer = tuple[int, dict[str, str], bytes]


class FakeHub:
    """Repositories by name, each a folder; requests are remembered.

    `delay_s` holds answers up, and `status` replaces them: of paths that contain `slow_only` and
    `status_only`. For weights, `cuts` has the number of bytes before the connection breaks, one
    number for each request; `gate` is passed before the second half is sent. `says` replaces some
    fields of a repository's description, and `code` is the hub's word for a status.
    """

    def __init__(self, repos: dict[str, Path]) -> None:
        self.repos = repos
        self.asked: list[str] = []
        self.ranges: list[str] = []
        self.delay_s = 0.0
        self.slow_only = ""
        self.status: int | None = None
        self.status_only = ""
        self.code = ""
        self.cuts: list[int] = []
        self.says: dict[str, dict[str, Any]] = {}
        self.half_sent, self.gate = threading.Event(), threading.Event()
        self.gate.set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextlib.contextmanager
    def serving(self) -> Iterator["FakeHub"]:
        """Serve until left."""
        # It looks every so many seconds whether it is to end, and whoever ends it waits for that.
        thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.gate.set()
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def answer(self, path: str, wanted: str | None) -> Answer:
        """Give status, headers and body for a path and a range of bytes."""
        self.asked.append(path)
        if self.slow_only in path:
            time.sleep(self.delay_s)
        if self.status is not None and self.status_only in path:
            return self.status, {"x-error-code": self.code} if self.code else {}, b"{}"
        for repo, folder in self.repos.items():
            if path.startswith((f"/api/models/{repo}/tree/",)):
                return _json(_tree(folder))
            if path.startswith(f"/api/models/{repo}"):
                asked = path.rpartition("/revision/")[2]
                return _json({**_info(repo, folder, _commit(asked)), **self.says.get(repo, {})})
            if path.startswith(f"/{repo}/resolve/"):
                asked, _, name = path.removeprefix(f"/{repo}/resolve/").partition("/")
                return _part(_file(folder / name, _commit(asked)), wanted)
        return 404, {"x-error-code": "RepoNotFound"}, b"{}"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                path, wanted = unquote(self.path.partition("?")[0]), self.headers["range"]
                status, headers, body = hub.answer(path, wanted)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                if self.command == "HEAD":
                    return
                with contextlib.suppress(ConnectionError):  # nobody waits for it any more
                    if path.endswith(WEIGHTS) and status in (200, 206):
                        self._send_weights(body, wanted)
                    else:
                        self.wfile.write(body)

            def _send_weights(self, body: bytes, wanted: str | None) -> None:
                hub.ranges.append(wanted or "")
                if hub.cuts:
                    self.wfile.write(body[: hub.cuts.pop(0)])
                    self.close_connection = True
                    return
                self.wfile.write(body[: len(body) // 2])
                hub.half_sent.set()
                hub.gate.wait(60)
                self.wfile.write(body[len(body) // 2 :])

            do_HEAD = do_GET  # noqa: N815

            def log_message(self, *_: object) -> None: ...

        return Handler


def _json(value: object) -> Answer:
    return 200, {"content-type": "application/json"}, json.dumps(value).encode()


def _files(folder: Path) -> dict[str, Path]:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file for file in files}


def _commit(revision: str) -> str:
    """Give the commit of a revision, which is its own if it is one."""
    if re.fullmatch("[0-9a-f]{40}", revision):
        return revision
    return COMMIT


def _info(repo: str, folder: Path, commit: str = COMMIT) -> dict[str, object]:
    siblings = [
        {"rfilename": name, "size": file.stat().st_size, "blobId": "0" * 40, **_lfs(file)}
        for name, file in _files(folder).items()
    ]
    return {"_id": "1", "id": repo, "modelId": repo, "sha": commit, "siblings": siblings}


def _tree(folder: Path) -> list[dict[str, object]]:
    return [
        {"type": "file", "path": name, "oid": _etag(file), "size": file.stat().st_size}
        for name, file in _files(folder).items()
    ]


def _lfs(file: Path) -> dict[str, object]:
    """Describe weights as the hub describes files that git does not keep."""
    if file.suffix not in WEIGHTS:
        return {}
    size = file.stat().st_size
    return {"lfs": {"size": size, "sha256": _etag(file), "pointerSize": 134}}


def sha256(file: Path) -> str:
    """Give a file's hash, which is the name of its blob too."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _etag(file: Path) -> str:
    if file.suffix in WEIGHTS:
        return sha256(file)
    return hashlib.sha1(file.read_bytes()).hexdigest()


def _file(file: Path, commit: str) -> Answer:
    if not file.is_file():
        return 404, {"x-error-code": "EntryNotFound"}, b""
    headers = {"etag": f'"{_etag(file)}"', "x-repo-commit": commit}
    return 200, headers, file.read_bytes()


def _part(answer: Answer, wanted: str | None) -> Answer:
    """Answer a range that is open at its end, as a resumed download asks for it."""
    status, headers, body = answer
    if status != 200 or not (match := re.fullmatch(r"bytes=(\d+)-", wanted or "")):
        return answer
    start = int(match[1])
    said = f"bytes {start}-{len(body) - 1}/{len(body)}"
    return 206, {**headers, "content-range": said}, body[start:]
