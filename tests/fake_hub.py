"""The model hub's HTTP API as far as downloads use it, serving folders from this machine."""

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """Repositories by name, each a folder; what was asked is remembered."""

    def __init__(self, repos: dict[str, Path]) -> None:
        self.repos = repos
        self.asked: list[str] = []
        self.delay_s = 0.0
        self.slow_only = ""
        self.status: int | None = None
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextlib.contextmanager
    def serving(self) -> Iterator["FakeHub"]:
        """Serve until left."""
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Give status, headers and body for a path."""
        self.asked.append(path)
        if self.slow_only in path:
            time.sleep(self.delay_s)
        if self.status is not None:
            return self.status, {}, b"{}"
        for repo, folder in self.repos.items():
            if path.startswith((f"/api/models/{repo}/tree/",)):
                return _json(_tree(folder))
            if path.startswith(f"/api/models/{repo}"):
                return _json(_info(repo, folder))
            if path.startswith(f"/{repo}/resolve/"):
                return _file(folder / path.removeprefix(f"/{repo}/resolve/").partition("/")[2])
        return 404, {"x-error-code": "RepoNotFound"}, b"{}"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                status, headers, body = hub.answer(unquote(self.path.partition("?")[0]))
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_HEAD = do_GET  # noqa: N815

            def log_message(self, *_: object) -> None: ...

        return Handler


def _json(value: object) -> tuple[int, dict[str, str], bytes]:
    return 200, {"content-type": "application/json"}, json.dumps(value).encode()


def _files(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def _info(repo: str, folder: Path) -> dict[str, object]:
    files = {name: folder / name for name in _files(folder)}
    siblings = [{"rfilename": name, "size": file.stat().st_size} for name, file in files.items()]
    return {"_id": "1", "id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings}


def _tree(folder: Path) -> list[dict[str, object]]:
    files = {name: folder / name for name in _files(folder)}
    return [
        {"type": "file", "path": name, "oid": _etag(file), "size": file.stat().st_size}
        for name, file in files.items()
    ]


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


def _file(file: Path) -> tuple[int, dict[str, str], bytes]:
    if not file.is_file():
        return 404, {"x-error-code": "EntryNotFound"}, b""
    headers = {"etag": f'"{_etag(file)}"', "x-repo-commit": COMMIT}
    return 200, headers, file.read_bytes()
