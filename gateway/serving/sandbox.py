"""A process for work whose cost a caller decides: it may be slow, swell or crash, and only it dies.

Native code can neither be stopped nor kept from overflowing its stack, and a template is a program.
So such work is done in a persistent process, spawned and never forked (MLX does not outlive a
fork), that is killed at a deadline or beyond its memory, and replaced at once.
"""

import contextlib
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

from gateway import logs

log = logs.get("sandbox")

Outcome: TypeAlias = tuple[str, Any]
"""What the process answered, or one of our own: busy, late or died, with a reason."""
End: TypeAlias = Literal["late", "died"]

HEAD: Final = struct.Struct("!Q")
READY: Final = 2  # processes: importing what they need takes one to two seconds
WAIT_S: Final = 30.0  # for those before us, each of whom takes `quick_s` at most
START_S: Final = 60.0  # for a process to import what it needs
LOOK_S: Final = 0.1  # between two looks at the memory of a process that no limit bounds
KEPT: Final = 1024  # what was killed for, by key
LATE_LASTS_S: Final = 600.0  # a machine may have been busy; a crash is remembered for good
GRACE_S: Final = 1.0


class Sandbox:
    """A context manager: its processes end with it. Calls are for worker threads, from any number.

    `command` is given the number of a socket; its protocol is in engine/sandboxed.py.
    Calls are made one after another, but one that takes longer than `quick_s` goes on by itself,
    while another process serves the rest. Only one may: a second one fails as busy.
    Work that was killed is remembered by its key, and not done again.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        timeout_s: float,
        quick_s: float = 1.0,
        is_memory_bounded: bool = sys.platform != "darwin",
    ) -> None:
        self._command = command
        self._timeout_s = timeout_s
        self._quick_s = min(quick_s, timeout_s)
        self._is_memory_bounded = is_memory_bounded
        self._turn = threading.Lock()
        self._slow = threading.Lock()
        self._changing = threading.Lock()
        self._idle: list[_Process] = []
        self._busy: set[_Process] = set()
        self._is_closed = False
        self._killed_for: OrderedDict[bytes, tuple[End, str, float]] = OrderedDict()

    def __call__(self, request: Mapping[str, Any], key: bytes) -> Outcome:
        """Do what is asked, once for each key that kills.

        Gives busy when others took all the time there was, late past the deadline and died when
        the process did; never raises for what is asked.
        """
        if (known := self._known(key)) is not None:
            return known
        if not self._turn.acquire(timeout=WAIT_S):
            return "busy", "others take all the time there is"
        try:
            process = self._taken()
            ends_at = time.monotonic() + self._timeout_s
            bounded = {**request, "seconds": self._timeout_s + GRACE_S}
            outcome = self._attempt(process, bounded, self._quick_s)
            if outcome is None:
                with self._changing:
                    if not self._idle and not self._is_closed:
                        self._idle.append(_Process(self._command))
        finally:
            self._turn.release()
        if outcome is None and self._quick_s < self._timeout_s:
            if self._slow.acquire(blocking=False):
                try:
                    outcome = self._attempt(process, None, ends_at - time.monotonic())
                finally:
                    self._slow.release()
            else:  # the machine may be busy, and not the work large
                outcome = self._attempt(process, None, self._quick_s)
                if outcome is None:
                    self._discard(process)
                    return "busy", "another takes as long"
        if outcome is None:
            return self._ended(process, key, "late", f"it took over {self._timeout_s:g} seconds")
        if outcome[0] == "died":
            return self._ended(process, key, "died", outcome[1])
        self._put_back(process)
        return outcome

    def _attempt(
        self, process: "_Process", request: Mapping[str, Any] | None, seconds: float
    ) -> Outcome | None:
        """Ask, or go on waiting for an answer; None when it takes longer."""
        try:
            return process.ask(request, seconds, watch_memory=not self._is_memory_bounded)
        except MemoryError:
            return "died", "it needs more memory than it may have"
        except (OSError, EOFError):
            return "died", process.cause()

    def _taken(self) -> "_Process":
        with self._changing:
            while self._idle and not self._idle[-1].is_alive:  # the system may end any of them
                self._idle.pop().kill()
            process = self._idle.pop() if self._idle else _Process(self._command)
            self._busy.add(process)
        with contextlib.suppress(OSError, EOFError):  # the request will meet it again
            process.wait_ready()
        return process

    def _put_back(self, process: "_Process") -> None:
        with self._changing:
            self._busy.discard(process)
            if len(self._idle) >= READY or self._is_closed or process.is_spent:
                process.kill()
            else:
                self._idle.append(process)
            self._replenish()

    def _discard(self, process: "_Process") -> None:
        process.kill()
        with self._changing:
            self._busy.discard(process)
            self._replenish()

    def _ended(self, process: "_Process", key: bytes, end: End, why: str) -> Outcome:
        self._discard(process)
        log.warning("sandbox_killed", why=why, key=key.hex()[:16])
        with self._changing:
            self._killed_for[key] = (end, why, time.monotonic())
            while len(self._killed_for) > KEPT:
                self._killed_for.popitem(last=False)
        return end, why

    def _known(self, key: bytes) -> Outcome | None:
        with self._changing:
            if (known := self._killed_for.get(key)) is None:
                return None
            end, why, since = known
            if end == "late" and time.monotonic() - since > LATE_LASTS_S:
                del self._killed_for[key]
                return None
            return end, why

    def _replenish(self) -> None:
        """Start what the next calls are to find ready, but for those at work, who come back.

        To start one takes a second or two of processor time, and slows those at work.
        """
        while len(self._idle) + len(self._busy) < READY and not self._is_closed:
            self._idle.insert(0, _Process(self._command))

    def __enter__(self) -> "Sandbox":
        with self._changing:
            self._is_closed = False
            self._replenish()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changing:
            self._is_closed = True
            while self._idle:
                self._idle.pop().kill()
            for process in self._busy:  # whoever waits for them sees that they are gone
                process.end()


class _Process:
    """One process and our end of its socket."""

    def __init__(self, command: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        secret = ("GATEWAY_", "OPENAI_", "HF_TOKEN")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(secret)}
        with theirs:
            self._process = subprocess.Popen(
                [command[0], *command[1:-1], str(theirs.fileno()), command[-1]],
                pass_fds=[theirs.fileno()],  # and no other: a listening socket must not live on
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**kept, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            )
        self._socket = ours
        self._expect(HEAD.size, is_head=True)
        self._max_bytes: int | None = None
        self._is_ready = False
        self.is_spent = False

    @property
    def is_alive(self) -> bool:
        """Return False if it has ended by itself."""
        return self._process.poll() is None

    def wait_ready(self) -> None:
        """Wait until it has imported what it needs."""
        if not self._is_ready:
            self._frame(time.monotonic() + START_S)
            self._is_ready = True

    def ask(
        self, request: Mapping[str, Any] | None, seconds: float, *, watch_memory: bool
    ) -> Outcome | None:
        """Send a request, if one is given, and wait for the answer; None when it takes longer.

        Raises OSError or EOFError when the process died, MemoryError when it is watched and holds
        more than the request allows.
        """
        ends_at = time.monotonic() + seconds
        if request is not None:
            self._max_bytes = request["max_bytes"] if watch_memory else None
            data = pickle.dumps(request)
            self._socket.settimeout(START_S)
            self._socket.sendall(HEAD.pack(len(data)) + data)  # at once, so that it wakes once
        frame = self._frame(ends_at)
        if frame is None:
            return None
        name, value, self.is_spent = pickle.loads(frame)
        return name, value

    def _frame(self, ends_at: float) -> bytearray | None:
        """Receive a frame; what came of one before a wait ended is kept for the next."""
        while True:
            if self._missing == 0:
                frame = self._frame_so_far
                is_head = self._is_head
                self._expect(HEAD.unpack(frame)[0] if is_head else HEAD.size, is_head=not is_head)
                if not is_head:
                    return frame
                continue
            left = ends_at - time.monotonic()
            if left <= 0:
                return None
            self._socket.settimeout(left if self._max_bytes is None else min(left, LOOK_S))
            try:
                view = memoryview(self._frame_so_far)[-self._missing :]
                if not (count := self._socket.recv_into(view)):
                    raise EOFError
                self._missing -= count
            except TimeoutError:
                most = self._max_bytes
                if most is not None and resident_bytes(self._process.pid) > most:
                    raise MemoryError from None

    def _expect(self, size: int, *, is_head: bool) -> None:
        """Make room for a frame, or for the head that tells its length."""
        self._frame_so_far = bytearray(size)
        self._missing, self._is_head = size, is_head

    def cause(self) -> str:
        """Return what ended it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_S)
        code = self._process.returncode
        if code is not None and code < 0:
            return f"it ended the process that tried it ({signal.Signals(-code).name})"
        return "it ended the process that tried it"

    def end(self) -> None:
        """End it, whatever it is doing."""
        self._process.kill()

    def kill(self) -> None:
        """End it and reap it, when nobody waits for it any more."""
        self._process.kill()
        self._socket.close()
        self._process.wait()


def resident_bytes(pid: int) -> int:
    """Ask the system for a process's resident memory; 0 when it is gone.

    For macOS, which knows RLIMIT_AS and does not hold to it.
    """
    asked = ["ps", "-o", "rss=", "-p", str(pid)]
    done = subprocess.run(asked, capture_output=True, check=False)
    return 1024 * int(done.stdout or 0)
