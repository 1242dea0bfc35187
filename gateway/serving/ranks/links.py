"""The connections between rank 0 and each other rank: rank 0 sends frames and gets replies.

An empty frame ends the group.
"""

import contextlib
import hmac
import json
import os
import queue
import secrets
import selectors
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final, TypeAlias
from weakref import WeakValueDictionary

from gateway import clock, logs
from gateway.errors import Unavailable

log = logs.get("ranks")

Link: TypeAlias = "Connection[Any, Any]"
JOIN_S: Final = 60.0  # seconds in which all ranks have to connect
END_S: Final = 5.0  # seconds in which the other ranks should close their connections
KEEP_ALIVE_S: Final = 11  # seconds: 5 of silence, then three probes every 2 seconds
LONGEST: Final = 1 << 30
MOST_UNKNOWN: Final = 64
STATUS_OF_A_LOSS: Final = 70
_WORD_BYTES: Final = 64 << 10
_OUTCOME_CHARS: Final = 2000
_STOP: Final = {"stop": True}
_ENDS: Final = (EOFError, OSError, ValueError, LookupError)


@dataclass(frozen=True, slots=True)
class Invitation:
    """The address of rank 0, and the secret with which the other ranks identify themselves."""

    host: str
    port: int
    word: str

    def encode(self) -> bytes:
        return json.dumps([self.host, self.port, self.word]).encode()

    @classmethod
    def decode(cls, data: bytes) -> "Invitation":
        host, port, word = json.loads(data)
        return cls(host, port, word)


class Sent:
    """A frame that was sent to every rank, with the replies so far."""

    def __init__(self) -> None:
        self.replies: dict[int, str] = {}


class Leader:
    """Rank 0's connections. All methods except `close` must run on the lane's thread."""

    def __init__(self, links: Mapping[int, Link]) -> None:
        self._links = links
        self._words: queue.SimpleQueue[tuple[int, int, str]] = queue.SimpleQueue()
        self._count = 0
        # Sent frames by number; the references are weak, so replies that nobody waits for are lost.
        self._sent: WeakValueDictionary[int, Sent] = WeakValueDictionary()
        self._is_over = False
        self.lost: str | None = None
        self.on_stop: Callable[[], object] = lambda: None
        self._threads = [
            threading.Thread(target=self._listen, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in links
        ]
        for thread in self._threads:
            thread.start()

    def send(self, frame: bytes) -> Sent:
        """Send a frame to every other rank. Raises Unavailable if a rank is gone."""
        self._count += 1
        sent = self._sent[self._count] = Sent()
        for rank, link in self._links.items():
            try:
                link.send_bytes(frame)
            except OSError:
                self._lose(f"rank {rank} is gone")
        self._check()
        return sent

    def replies(self, sent: Sent, wait_s: float | None = None) -> Mapping[int, str] | None:
        """Return the replies, or None if some are missing after `wait_s`. Raises Unavailable."""
        until = None if wait_s is None else clock.now() + wait_s
        while len(sent.replies) < len(self._links):
            self._check()
            try:
                left_s = None if until is None else max(0.0, until - clock.now())
                rank, number, reply = self._words.get(timeout=left_s)
            except queue.Empty:
                return None
            waiting = self._sent.get(number)
            if waiting is not None:
                waiting.replies[rank] = reply
        return sent.replies

    def agree(self, sent: Sent, outcome: str) -> None:
        """Wait until every rank has replied with this outcome. Raises Unavailable."""
        # Results that were computed with a rank that diverged must not be used.
        for rank, reply in (self.replies(sent) or {}).items():
            if reply != outcome:
                self._lose(f"rank {rank} got a different result")
        self._check()

    def close(self) -> None:
        self._is_over = True
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.send_bytes(b"")
        until = clock.now() + END_S
        for thread in self._threads:
            thread.join(max(0.0, until - clock.now()))

    def _check(self) -> None:
        if self.lost is not None:
            raise Unavailable(f"The group is ending: {self.lost}.", retry_after_s=1)

    def _listen(self, rank: int) -> None:
        with self._links[rank] as link, contextlib.suppress(*_ENDS):
            while True:
                word = json.loads(link.recv_bytes(_WORD_BYTES))
                if word == _STOP:
                    log.info("rank_stops", rank=rank)
                    self.on_stop()
                else:
                    self._words.put((rank, word["of"], word["reply"]))
        self._lose(f"rank {rank} is gone")

    def _lose(self, what: str) -> None:
        is_news = self.lost is None and not self._is_over
        if is_news:
            self.lost = what
        self._words.put((0, 0, ""))
        if is_news:
            log.critical("rank_lost", lost=what, hint="see that rank's log; the group ends")


@contextlib.contextmanager
def inviting(host: str) -> Iterator[tuple[Invitation, socket.socket]]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        port = listener.getsockname()[1]
        yield Invitation(host, port, secrets.token_hex(32)), listener


def accept(listener: socket.socket, invitation: Invitation, ranks: Sequence[int]) -> Leader:
    """Wait until these ranks have connected. Raises TimeoutError after JOIN_S."""
    links: dict[int, socket.socket] = {}
    # Connections that have not named their rank, oldest first, with the bytes received so far.
    unknown: dict[socket.socket, bytearray] = {}
    until = clock.now() + JOIN_S
    listener.setblocking(False)
    try:
        while set(ranks) - links.keys():
            missing = sorted(set(ranks) - links.keys())
            left_s = until - clock.now()
            if left_s <= 0:
                raise TimeoutError(f"ranks {missing} did not connect in {JOIN_S:g} s")
            for link in _readable([listener, *unknown], left_s):
                if link is listener:
                    _welcome(listener, unknown)
                    continue
                hello = _hear(link, unknown[link]) if link in unknown else None
                if hello is None:
                    continue
                del unknown[link]
                rank = _rank_in(hello, invitation)
                if rank not in missing or rank in links:
                    _refuse(link)
                else:
                    links[rank] = link
    finally:
        for link in unknown:
            _refuse(link)
    return Leader({rank: _connection(link) for rank, link in links.items()})


def _welcome(listener: socket.socket, unknown: dict[socket.socket, bytearray]) -> None:
    with contextlib.suppress(OSError):
        link, _ = listener.accept()
        link.setblocking(False)
        unknown[link] = bytearray()
    if len(unknown) > MOST_UNKNOWN:
        oldest = next(iter(unknown))
        del unknown[oldest]
        _refuse(oldest)


def _readable(links: Sequence[socket.socket], wait_s: float) -> list[socket.socket]:
    with selectors.DefaultSelector() as selector:
        for link in links:
            selector.register(link, selectors.EVENT_READ, link)
        return [key.data for key, _ in selector.select(wait_s)]


def _hear(link: socket.socket, said: bytearray) -> bytes | None:
    """Read more of a connection's first frame, and return the frame once it is complete.

    Returns None before, and empty bytes if the frame is invalid.
    """
    length = int.from_bytes(said[:4], "big")
    size = 4
    if len(said) >= size:
        size += length
    try:
        data = link.recv(size - len(said))
    except BlockingIOError:
        return None
    except OSError:
        return b""
    if not data:
        return b""
    said += data
    length = int.from_bytes(said[:4], "big")
    if len(said) >= 4 and not 0 < length <= _WORD_BYTES:
        return b""
    if len(said) > 4 and len(said) == 4 + length:
        return bytes(said[4:])
    return None


def _rank_in(hello: bytes, invitation: Invitation) -> int:
    """Return the rank in a connection's first frame; -1 without the right secret."""
    try:
        word, rank = json.loads(hello)
        if hmac.compare_digest(str(word), invitation.word) and type(rank) is int:
            return rank
    except (ValueError, TypeError):
        pass
    return -1


def _refuse(link: socket.socket) -> None:
    with contextlib.suppress(OSError):
        log.warning("stranger_refused", address=link.getpeername()[0])
    link.close()


class Follower:
    """The connection of a rank above 0 to rank 0."""

    def __init__(self, link: Link, exit_process: Callable[[int], Any] = os._exit) -> None:
        self._link = link
        self._exit_process = exit_process
        self._frames: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._number = 0
        threading.Thread(target=self._listen, name="rank 0", daemon=True).start()

    @classmethod
    def connect(
        cls,
        invitation: Invitation,
        rank: int,
        exit_process: Callable[[int], Any] = os._exit,
    ) -> "Follower":
        address = (invitation.host, invitation.port)
        link = _connection(socket.create_connection(address, timeout=JOIN_S))
        link.send_bytes(json.dumps([invitation.word, rank]).encode())
        return cls(link, exit_process)

    def next_frame(self, wait_s: float) -> bytes | None:
        try:
            frame = self._frames.get(timeout=wait_s)
        except queue.Empty:
            return None
        self._number += 1
        return frame

    def reply(self, outcome: str) -> None:
        word = {"of": self._number, "reply": outcome[:_OUTCOME_CHARS]}
        with contextlib.suppress(OSError):  # rank 0 is gone, so `_listen` exits the process
            self._link.send_bytes(json.dumps(word).encode())

    def ask_to_stop(self) -> None:
        with contextlib.suppress(OSError):
            self._link.send_bytes(json.dumps(_STOP).encode())

    def _listen(self) -> None:
        with self._link, contextlib.suppress(EOFError, OSError):
            while True:
                frame = self._link.recv_bytes(LONGEST)
                self._frames.put(frame)
                if not frame:
                    return
        # Rank 0 disconnected without an empty frame. The main thread may be stuck in a pass, so the
        # process exits at once.
        with contextlib.suppress(Exception):  # stderr may not be writable
            log.critical("leader_lost", hint="rank 0 ended unexpectedly: see its log")
            sys.stderr.flush()
        self._exit_process(STATUS_OF_A_LOSS)


def _connection(link: socket.socket) -> Link:
    """Return a connection without Nagle's delay, and with keep-alive probes."""
    link.setblocking(True)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle = "TCP_KEEPALIVE" if sys.platform == "darwin" else "TCP_KEEPIDLE"
    for name, value in ((idle, 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return Connection(link.detach())
