"""Processes for untrusted work, which may take too long, use too much memory or crash.

The processes are spawned, because MLX does not survive a fork.
"""

import contextlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

from gateway import logs

log = logs.get("sandbox")

Outcome: TypeAlias = tuple[str, Any]
"""The answer of a process, or `busy`, `slow`, `late`, `died` or `killed` with a reason."""
End: TypeAlias = Literal["late", "died"]

READY: Final = 2  # processes kept ready, since the imports of one take one to two seconds
WAITS: Final = 6  # work may take this many times its processor time, since the machine may be busy
WAIT_S: Final = 30.0
START_S: Final = 60.0
POLL_S: Final = 0.1  # seconds between checks of memory, if the system does not limit it
MOST_KEPT: Final = 1024
LATE_LASTS_S: Final = 600.0  # `late` is forgotten after this, since the machine may have been slow
GRACE_S: Final = 1.0
CROSS_S: Final = 10.0
MOST_BYTES: Final = 1 << 16  # most bytes of an answer, besides the text that its request allows
CHAR_BYTES: Final = 12  # most bytes of a character, since JSON writes some as two escapes
# The environment variables that a process is given, which include no keys.
PASSED: Final = re.compile(
    "PATH|HOME|TMPDIR|LANG|LC_.*|PYTHONPATH|VIRTUAL_ENV|LD_LIBRARY_PATH|DYLD_.*|SYSTEMROOT"
)
KILLED: Final = "killed"
LATE: Final = "late"


class Sandbox:
    """A context manager that runs requests in processes until exit. Safe on any worker thread.

    `command` is passed a connection's file descriptor; engine/sandbox_worker.py has the protocol.
    One call that takes longer than `quick_s` may go on in its process while others are served.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        timeout_s: float,
        quick_s: float = 1.0,
        wait_s: float | None = None,
        is_memory_bounded: bool = sys.platform != "darwin",
    ) -> None:
        self._command = command
        self._timeout_s = timeout_s
        self._wait_s = WAITS * timeout_s if wait_s is None else wait_s
        self._quick_s = min(quick_s, timeout_s)
        self._is_memory_bounded = is_memory_bounded
        self._turn = threading.Lock()
        self._slow = threading.Lock()
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        self._busy: set[_Process] = set()
        self._is_closed = False
        self._killed: OrderedDict[bytes, tuple[End, str, float]] = OrderedDict()

    def __call__(self, request: Mapping[str, Any], key: bytes) -> Outcome:
        """Run a request and return the outcome, or the remembered `late` or `died` of its key.

        `busy`: other calls took all the time. `late`: the request took over `timeout_s` of
        processor time. `died`: its process died. `slow`: it waited for a processor for too long.
        `killed`: the system ended its process twice, maybe for lack of memory.
        """
        outcome = self._call(request, key)
        if outcome[0] == KILLED and not self._is_closed:
            outcome = self._call(request, key)
        return outcome

    def _call(self, request: Mapping[str, Any], key: bytes) -> Outcome:
        earlier = self._find_killed(key)
        if earlier is not None:
            return earlier
        if not self._turn.acquire(timeout=WAIT_S):
            return "busy", "other calls take all the time"
        try:
            process = self._take()
            ends_at = time.monotonic() + self._wait_s
            limits = {"processor_s": self._timeout_s, "seconds": self._wait_s + GRACE_S}
            bounded = {**request, **limits}
            outcome = self._attempt(process, bounded, self._quick_s)
            if outcome is None:
                with self._lock:
                    if not self._idle and not self._is_closed:
                        self._idle.append(_Process(self._command))
        finally:
            self._turn.release()
        if outcome is None:
            if self._slow.acquire(blocking=False):
                try:
                    outcome = self._attempt(process, None, ends_at - time.monotonic())
                finally:
                    self._slow.release()
            else:  # the work may still be quick, since a busy machine may have delayed it
                outcome = self._attempt(process, None, self._quick_s)
                if outcome is None:
                    self._discard(process)
                    return "busy", "another slow call is running"
        if outcome is None:
            outcome = "slow", f"it waited over {self._wait_s:g} seconds for a processor"
        if outcome[0] == LATE:
            why = f"it took over {self._timeout_s:g} seconds of processor time"
            return self._end(process, key, "late", why)
        if outcome[0] == "died":
            return self._end(process, key, "died", outcome[1])
        if outcome[0] in (KILLED, "slow"):
            self._discard(process)
            log.warning("sandbox_killed", why=outcome[1])
            return outcome
        self._put_back(process)
        return outcome

    def _attempt(
        self, process: "_Process", request: Mapping[str, Any] | None, seconds: float
    ) -> Outcome | None:
        """Send a request, unless it is None; return the outcome, or None after `seconds`."""
        try:
            return process.ask(request, seconds, watch_memory=not self._is_memory_bounded)
        except MemoryError:
            return "died", "it needs more memory than it may have"
        except (OSError, EOFError):
            return process.ending()
        except (ValueError, RecursionError):
            return "died", "the process that tried it gave an invalid answer"

    def _take(self) -> "_Process":
        with self._lock:
            while self._idle and not self._idle[-1].is_alive:
                self._idle.pop().kill()
            process = self._idle.pop() if self._idle else _Process(self._command)
            self._busy.add(process)
        with contextlib.suppress(OSError, EOFError):
            process.wait_ready()
        return process

    def _put_back(self, process: "_Process") -> None:
        with self._lock:
            self._busy.discard(process)
            if len(self._idle) >= READY or self._is_closed or process.is_spent:
                process.kill()
            else:
                self._idle.append(process)
            self._replenish()

    def _discard(self, process: "_Process") -> None:
        process.kill()
        with self._lock:
            self._busy.discard(process)
            self._replenish()

    def _end(self, process: "_Process", key: bytes, end: End, why: str) -> Outcome:
        self._discard(process)
        log.warning("sandbox_killed", why=why, key=key.hex()[:16])
        with self._lock:
            self._killed[key] = (end, why, time.monotonic())
            while len(self._killed) > MOST_KEPT:
                self._killed.popitem(last=False)
        return end, why

    def _find_killed(self, key: bytes) -> Outcome | None:
        with self._lock:
            earlier = self._killed.get(key)
            if earlier is None:
                return None
            end, why, since = earlier
            if end == "late" and time.monotonic() - since > LATE_LASTS_S:
                del self._killed[key]
                return None
            return end, why

    def _replenish(self) -> None:
        # Busy processes count too, since starting more would take processor time from them.
        while len(self._idle) + len(self._busy) < READY and not self._is_closed:
            self._idle.insert(0, _Process(self._command))

    def warm(self) -> None:
        with self._lock:
            self._replenish()

    def __enter__(self) -> "Sandbox":
        with self._lock:
            self._is_closed = False
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._is_closed = True
            while self._idle:
                self._idle.pop().kill()
            for process in self._busy:
                process.end()


class _Process:
    """A process of a sandbox, and the connection to it."""

    def __init__(self, command: Sequence[str]) -> None:
        self._connection, other_end = multiprocessing.Pipe()
        passed = {name: value for name, value in os.environ.items() if PASSED.fullmatch(name)}
        with other_end:
            descriptor = other_end.fileno()
            self._process = subprocess.Popen(
                [*command[:-1], str(descriptor), command[-1]],
                pass_fds=[descriptor],  # the child must not keep listening sockets open
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**passed, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            )
        # This thread reaps the process even if no later call notices that it has ended.
        threading.Thread(target=self._process.wait, name="reaper", daemon=True).start()
        self._max_bytes: int | None = None
        self._max_answer = MOST_BYTES
        self._answer_bytes: int | None = None
        self._is_ready = False
        self.is_spent = False

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait_ready(self) -> None:
        if self._is_ready:
            return
        if not self._connection.poll(START_S):
            self.kill()
            return
        self._connection.recv_bytes(MOST_BYTES)
        self._is_ready = True

    def ask(
        self, request: Mapping[str, Any] | None, seconds: float, *, watch_memory: bool
    ) -> Outcome | None:
        """Send a request, unless it is None. Return the answer, or None after `seconds`.

        Raises OSError or EOFError if the process died, ValueError or RecursionError if its answer
        is invalid, and, with `watch_memory`, MemoryError if it holds more than the request allows.
        """
        ends_at = time.monotonic() + seconds
        if request is not None:
            self._max_bytes = request["max_bytes"] if watch_memory else None
            self._max_answer = MOST_BYTES + CHAR_BYTES * request.get("max_chars", 0)
            self._answer_bytes = request.get("answer_bytes")
            self._send(request)
        if not self._has_answer(ends_at):
            return None
        # JSON is read because a pickle from the process could run code here.
        match json.loads(self._connection.recv_bytes(self._max_answer)):
            case [str(name), value, bool(is_spent)]:
                self.is_spent = is_spent
                return name, value
            case [str(name), None, bool(is_spent), int(size)] if size == self._answer_bytes:
                self.is_spent = is_spent
                with self._crossing():
                    data = self._connection.recv_bytes(size)
                if len(data) == size:
                    return name, data
        raise ValueError("the answer is invalid")

    def _send(self, request: Mapping[str, Any]) -> None:
        data = request.get("data")
        sized = request if data is None else {**request, "data": len(data)}
        with self._crossing() if data else contextlib.nullcontext():
            self._connection.send_bytes(json.dumps(sized).encode())
            if data is not None:
                self._connection.send_bytes(data)

    @contextlib.contextmanager
    def _crossing(self) -> Iterator[None]:
        """End the process unless the body sends or receives a message within CROSS_S."""
        timer = threading.Timer(CROSS_S, self.end)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _has_answer(self, ends_at: float) -> bool:
        while True:
            left = max(0.0, ends_at - time.monotonic())
            if self._max_bytes is None:
                return self._connection.poll(left)
            if self._connection.poll(min(left, POLL_S)):
                return True
            if resident_bytes(self._process.pid) > self._max_bytes:
                raise MemoryError
            if not left:
                return False

    def ending(self) -> Outcome:
        # Only the system sends SIGKILL here; exceeded limits and crashes end a process otherwise.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_S)
        code = self._process.returncode
        if code == -signal.SIGKILL:
            return KILLED, "the system ended the process that tried it"
        if code == -signal.SIGPROF:
            return LATE, "its processor time was up"
        if code is not None and code < 0:
            return "died", f"it ended the process that tried it ({signal.Signals(-code).name})"
        return "died", "it ended the process that tried it"

    def end(self) -> None:
        self._process.kill()

    def kill(self) -> None:
        """Kill the process and close its connection. No call may be waiting for an answer."""
        self._process.kill()
        self._connection.close()
        self._process.wait()


def resident_bytes(pid: int) -> int:
    """Return a process's resident memory, as `ps` reports it; 0 if it has ended."""
    # macOS needs this, since it does not enforce RLIMIT_AS.
    command = ["ps", "-o", "rss=", "-p", str(pid)]
    output = subprocess.run(command, capture_output=True, check=False).stdout
    return 1024 * int(output or 0)
