"""A client that takes next to none of the server's cores: plain sockets, answers not parsed."""

import json
import re
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

TIMEOUT_S: Final = 120.0
_PATH: Final = "/v1/chat/completions"
_LAST: Final = 4096  # bytes that are kept of an answer: its usage and its end are in them
_TOKENS: Final = re.compile(rb'"completion_tokens": ?(\d+)')


@dataclass(slots=True)
class _Stream:
    """One answer as it comes. `tokens` is the number in its usage; None until it is whole."""

    status: bytes = b""
    last: bytes = b""
    tokens: int | None = None

    def take(self, received: bytes) -> bool:
        """Take more of the answer; return True once no more is wanted."""
        if len(self.status) < 12:
            self.status = (self.status + received)[:12]
        self.last = (self.last + received)[-_LAST:]
        if not received or (len(self.status) >= 12 and not self.status.endswith(b" 200")):
            return True
        if b"data: [DONE]" not in self.last:
            return False
        if (usage := _TOKENS.search(self.last)) is not None:
            self.tokens = int(usage[1])
        return True


@dataclass(frozen=True, slots=True)
class Streamed:
    """The results of requests sent at once: the seconds from the first to the last, and tokens.

    Each answer has its number of tokens, or None if it was refused or cut short.
    """

    seconds: float
    tokens: Sequence[int | None]

    @property
    def token_s(self) -> float | None:
        """Return the seconds that a token of the whole answers took; None if there is none."""
        total = sum(tokens or 0 for tokens in self.tokens)
        return self.seconds / total if total else None


def asks(model: str, prompts: Sequence[str], tokens: int, *, temperature: float = 0) -> list[bytes]:
    """Return the bodies of streamed chat requests."""
    given = {
        "model": model,
        "max_tokens": tokens,
        "temperature": temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return [
        json.dumps({**given, "messages": [{"role": "user", "content": prompt}]}).encode()
        for prompt in prompts
    ]


def stream_all(url: str, bodies: Sequence[bytes], timeout_s: float = TIMEOUT_S) -> Streamed:
    """Send chat requests that ask for streams with usage, all at once, each by a connection of its
    own. These are opened before, one after another: mlx-lm's server loses some otherwise.
    """
    address = urlsplit(url)
    assert address.hostname is not None
    assert address.port is not None
    streams = [_Stream() for _ in bodies]
    with selectors.DefaultSelector() as selector:
        connections = []
        try:
            for stream in streams:
                peer = (address.hostname, address.port)
                connections.append(socket.create_connection(peer, timeout_s))
                selector.register(connections[-1], selectors.EVENT_READ, stream)
            started = time.perf_counter()
            for connection, body in zip(connections, bodies, strict=True):
                connection.sendall(_request(address.netloc, body))
            _read(selector, started + timeout_s)
            seconds = time.perf_counter() - started
        finally:
            for connection in connections:
                connection.close()
    return Streamed(seconds, [stream.tokens for stream in streams])


def _request(host: str, body: bytes) -> bytes:
    head = (
        f"POST {_PATH} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


def _read(selector: selectors.BaseSelector, deadline: float) -> None:
    """Read until each stream is whole, or was closed, or the time is up."""
    while selector.get_map() and (left := deadline - time.perf_counter()) > 0:
        for key, _ in selector.select(left):
            connection, stream = key.fileobj, key.data
            assert isinstance(connection, socket.socket)
            try:
                received = connection.recv(1 << 16)
            except OSError:
                received = b""
            if stream.take(received):
                selector.unregister(connection)
