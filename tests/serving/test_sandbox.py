"""Work in the sandbox may be slow, swell or crash; the next call finds the sandbox ready."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gateway.engine import sandbox_worker
from gateway.serving.sandbox import Sandbox, resident_bytes
from tests.sandboxes import SLOW, grammar, sandbox, template

ROOT = Path(__file__).parents[2]
OK = ("rendered", "ok")
LONG = "{% for a in range(6000) %}{% for b in range(2000) %}{% endfor %}{% endfor %}"
REFERENCES = {str(i): {"items": {"$ref": f"#/{i + 1}"}} for i in range(5000)}
DEADLY_SCHEMA = {"$ref": "#/0", **REFERENCES, "5000": {}}
DEADLY = grammar(json.dumps({"grammars": [{"json_schema": DEADLY_SCHEMA}]}))


@pytest.fixture(scope="module")
def templates() -> Iterator[Sandbox]:
    """Give a sandbox for templates with short deadlines."""
    with sandbox("template", 1, quick_s=0.3) as box:
        yield box


def test_what_crashes_ends_only_the_process_that_tried_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cause is reported and remembered by its key for good, and the next call is served."""
    monkeypatch.setattr("gateway.serving.sandbox.LATE_LASTS_S", 0.0)
    with sandbox("grammar") as box:
        assert box(grammar('start: "a"'), b"a") == ("tried", None)
        died = box(DEADLY, b"deadly")
        assert died[0] == "died"
        assert "SIG" in died[1]
        assert box(grammar('start: "a"'), b"deadly") == died  # nothing is tried by that key
        assert box(grammar('start: "a"'), b"a") == ("tried", None)


class Killer:
    """Kills the working process a given number of times, as the system does when memory is short.

    With another signal it stops the process, like one that gets no processor.
    """

    def __init__(self, box: Sandbox, times: int, by: signal.Signals = signal.SIGKILL) -> None:
        self._box = box
        self._by = by
        self.left = times

    def __enter__(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        killed: set[int] = set()
        while self.left and not self._over.wait(0.01):
            for process in list(self._box._busy):
                pid = process._process.pid
                if process._is_ready and pid not in killed:
                    killed.add(pid)
                    self.left -= 1
                    os.kill(pid, self._by)


def test_work_whose_process_the_system_kills_is_tried_once_more() -> None:
    """The kernel kills these first where memory is short: it says nothing of the work."""
    with sandbox("template", 30, quick_s=30) as box:
        with Killer(box, 1):
            assert box(template(LONG), b"long")[0] == "rendered"
        with Killer(box, 2):
            assert box(template(LONG), b"longer")[0] == "killed"
        assert box(template(LONG), b"longer")[0] == "rendered"  # it is remembered of none


def test_what_takes_too_long_is_killed(templates: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work ends at its deadline by the sandbox's own clock.

    It is not tried again for a while, for other work may have slowed it, and the next work is
    served.
    """
    why = "it took over 1 seconds of processor time"
    assert templates(template(SLOW), b"slow") == ("late", why)
    assert templates(template("ok"), b"slow")[0] == "late"
    assert templates(template("ok"), b"ok") == OK
    monkeypatch.setattr("gateway.serving.sandbox.LATE_LASTS_S", 0.0)
    assert templates(template("ok"), b"slow") == OK


def test_what_gets_no_processor_is_not_blamed() -> None:
    with sandbox("template", 20, quick_s=0.2, wait_s=1) as box:
        assert box(template("ok"), b"ok") == OK
        with Killer(box, 1, signal.SIGSTOP):
            outcome, why = box(template(LONG), b"long")
        assert outcome == "slow"
        assert "1 seconds" in why
        assert box(template("ok"), b"long") == OK


def test_what_takes_long_keeps_nobody_else() -> None:
    """It goes on in its process while another serves the rest; only one may, until the end."""
    with ThreadPoolExecutor(3) as threads:
        with sandbox("template", 120, quick_s=0.3) as box:
            list(threads.map(lambda text: box(template(text), b""), [LONG, "ok"]))  # both are ready
            slow = threads.submit(box, template(SLOW), b"first")
            for _ in range(5000):
                if box._busy:
                    break
                time.sleep(0.001)
            quick = [threads.submit(box, template("ok"), b"ok") for _ in range(5)]
            assert [each.result() for each in quick] == [OK] * 5
            assert not slow.done()
            # No third one was started meanwhile: that takes seconds of processor time from these.
            assert len(box._idle) + len(box._busy) == 2
            assert box(template(SLOW), b"second") == ("busy", "another slow call is running")
            assert box(template("ok"), b"ok") == OK
        assert slow.result()[0] == "killed"


CHILD = """
import json, os, pickle, sys
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[1]))
class Evil:
    def __reduce__(self):
        return os.mkdir, (sys.argv[2],)
connection.send_bytes({ready})
connection.recv_bytes()
connection.send_bytes({answer})
connection.recv_bytes()
"""
READY = """b'["ready", null, false]'"""


def child(folder: Path, answer: str, ready: str = READY) -> Sandbox:
    """Stand in for a process that answers its first request with these bytes, in Python's words."""
    script = folder / "child.py"
    script.write_text(CHILD.format(answer=answer, ready=ready))
    return Sandbox((sys.executable, "-P", str(script), str(folder / "made")), timeout_s=30)


@pytest.mark.parametrize(
    ("answer", "ready"),
    [
        ("pickle.dumps(Evil())", READY),
        ("pickle.dumps(Evil())", "pickle.dumps(Evil())"),
        ("""b'["rendered", "ok"]'""", READY),
        ("""b'[["rendered"], "ok", false]'""", READY),
        ("b'[' * 50_000", READY),
        ("b'\\xff\\xfe'", READY),
        ("b' ' * 100_000", READY),
    ],
    ids=["a pickle", "two pickles", "short", "odd", "deep", "no text", "large"],
)
def test_what_a_process_sends_is_data(tmp_path: Path, answer: str, ready: str) -> None:
    """A process that foreign code has taken over runs nothing here, and its call has failed."""
    with child(tmp_path, answer, ready) as box:
        assert box(grammar('start: "a"'), b"a")[0] == "died"
    assert not (tmp_path / "made").exists()


PIXELS_CHILD = """
import json, sys, time
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[1]))
connection.send_bytes(b'["ready", null, false]')
while True:
    request = json.loads(connection.recv_bytes())
    {takes}
    connection.send_bytes(json.dumps({answer}).encode())
    {sends}
"""
TAKES = 'data = connection.recv_bytes(request["data"])'
ANSWER = """["decoded", None, False, 12]"""
SENDS = "connection.send_bytes(data[:12])"
PICTURE = {"kind": "decode", "data": b"pixels" * 10, "answer_bytes": 12, "max_bytes": 1 << 30}


def pixels_child(folder: Path, takes: str, answer: str, sends: str) -> Sandbox:
    script = folder / "child.py"
    script.write_text(PIXELS_CHILD.format(takes=takes, answer=answer, sends=sends))
    return Sandbox((sys.executable, "-P", str(script), ""), timeout_s=30)


def test_a_file_and_pixels_cross_as_they_are(tmp_path: Path) -> None:
    with pixels_child(tmp_path, TAKES, ANSWER, SENDS) as box:
        for _ in range(3):
            assert box(PICTURE, b"a") == ("decoded", b"pixelspixels")
        large = {**PICTURE, "data": b"pixels" * 4_000_000}
        assert box(large, b"b") == ("decoded", b"pixelspixels")


@pytest.mark.parametrize(
    ("answer", "sends"),
    [
        (ANSWER, "connection.send_bytes(data[:11])"),
        (ANSWER, "connection.send_bytes(data[:13])"),
        (ANSWER, "sys.exit()"),
        ("""["decoded", None, False, 13]""", "connection.send_bytes(data[:13])"),
        ("""["decoded", None, False, 1 << 40]""", SENDS),
        ("""["decoded", None, False, -1]""", SENDS),
        ("""["decoded", None, False, "12"]""", SENDS),
        ("""["decoded", "text", False, 12]""", SENDS),
    ],
)
def test_pixels_of_another_number_are_an_invalid_answer(
    tmp_path: Path, answer: str, sends: str
) -> None:
    with pixels_child(tmp_path, TAKES, answer, sends) as box:
        assert box(PICTURE, b"a")[0] == "died"


def test_bytes_that_nobody_asked_for_are_an_invalid_answer(tmp_path: Path) -> None:
    with pixels_child(tmp_path, "data = bytes(12)", ANSWER, SENDS) as box:
        assert box(template("ok"), b"a")[0] == "died"


@pytest.mark.parametrize(
    ("takes", "sends"),
    [("time.sleep(60)", ""), (TAKES, "time.sleep(60)")],
    ids=["takes no file", "sends no pixels"],
)
def test_a_process_that_stands_still_keeps_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, takes: str, sends: str
) -> None:
    monkeypatch.setattr("gateway.serving.sandbox.CROSS_S", 0.5)
    with pixels_child(tmp_path, takes, ANSWER, sends) as box:
        assert box({**PICTURE, "data": bytes(8 << 20)}, b"a")[0] == "killed"


def test_a_process_has_no_secret_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GATEWAY_API_KEYS", "AWS_SECRET_ACCESS_KEY", "PATH_TO_KEY", "LC_TIME", "TMPDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    with child(tmp_path, 'json.dumps(["rendered", list(os.environ), False]).encode()') as box:
        outcome, names = box(template("ok"), b"ok")
    assert outcome == "rendered"
    assert {"PATH", "LC_TIME", "TMPDIR", "OMP_NUM_THREADS"} <= {*names}
    assert not [name for name in names if "KEY" in name]


PANICKING = """
import json, runpy, sys
from tokenizers import Tokenizer, decoders, models
worker = runpy.run_path(sys.argv[2])
def panic(request):
    tokenizer = Tokenizer(models.BPE(vocab={"b": 0}, merges=[]))
    tokenizer.decoder = decoders.Strip("b", 1, 1)
    return "rendered", tokenizer.decode([0])
worker["KINDS"]["panic"] = panic
from multiprocessing.connection import Connection
worker["serve"](Connection(int(sys.argv[1])), "template")
"""


def test_a_panic_of_native_code_is_a_refusal(tmp_path: Path) -> None:
    """It is no Exception of Python, and costs the request alone: the process serves the next."""
    script = tmp_path / "panicking.py"
    script.write_text(PANICKING)
    with Sandbox((sys.executable, str(script), sandbox_worker.__file__), timeout_s=30) as box:
        outcome, why = box({**template(""), "kind": "panic"}, b"panic")
        assert (outcome, why.partition(":")[0]) == ("refused", "PanicException")
        pids = {each._process.pid for each in box._idle}
        assert box(template("ok"), b"ok") == OK
        assert {each._process.pid for each in box._idle} == pids


@pytest.mark.parametrize("is_memory_bounded", [True, False])
def test_a_process_that_takes_too_much_memory_is_ended(is_memory_bounded: bool) -> None:
    """A limit ends it or, where the system keeps none, a look at it now and then."""
    hungry = template("{% set x = 'é' * 400000000 %}" + SLOW) | {"max_bytes": 1 << 28}
    with sandbox("template", 30, is_memory_bounded=is_memory_bounded) as box:
        outcome, why = box(hungry, b"hungry")
        assert (outcome in ("large", "died"), why) == (
            True,
            "it needs more memory than it may have",
        )
        assert box(template("ok"), b"ok") == OK


def test_a_process_of_a_large_gateway_is_kept() -> None:
    """Memory that the gateway held at the process's start is not counted as its own."""
    weights = bytearray(600 << 20)
    with sandbox("grammar") as box:
        box(grammar('start: "a"'), b"a")
        first = {each._process.pid for each in box._idle}
        box(grammar('start: "a"'), b"b")
        assert {each._process.pid for each in box._idle} == first
    del weights


def test_a_large_request_and_its_answer_arrive_whole(templates: Sandbox) -> None:
    text = "é" * 3_000_000
    assert templates(template("{{ text }}", text=text), b"large") == ("rendered", text)


def test_a_process_that_is_gone_is_replaced() -> None:
    """The next caller has not ended it, and is not blamed."""
    with sandbox("grammar") as box:
        box(grammar('start: "a"'), b"a")
        for each in box._idle:
            os.kill(each._process.pid, signal.SIGKILL)
            each._process.wait()
        outcomes = [box(grammar('start: "a"'), b"%d" % i)[0] for i in range(3)]
        assert outcomes == ["tried", "tried", "tried"]


def test_a_process_that_the_system_ends_leaves_no_zombie() -> None:
    with sandbox("grammar") as box:
        assert not box._idle, "a gateway without a chat model has none"
        box.warm()
        box.warm()
        assert len(box._idle) == 2
        pids = [each._process.pid for each in box._idle]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for _ in range(200):
            if not any(map(_state, pids)):
                break
            time.sleep(0.05)
        assert [_state(pid) for pid in pids] == [b"", b""]


GATEWAY = """
import socket, sys, threading, time
from tests.sandboxes import SLOW, sandbox, template
listener = socket.create_server(("127.0.0.1", 0))
listener.set_inheritable(True)
with sandbox("template", 1, wait_s=3) as box:
    box(template("ok"), b"ok")
    if len(sys.argv) > 1:
        threading.Thread(target=box, args=(template(SLOW), b"slow"), daemon=True).start()
        for _ in range(500):
            if box._busy:
                break
            time.sleep(0.01)
    pids = [each._process.pid for each in (*box._idle, *box._busy)]
    print(listener.getsockname()[1], *pids, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("busy", [(), ("busy",)])
def test_a_killed_gateway_leaves_nothing(busy: tuple[str, ...]) -> None:
    """Neither its processes, which end when idle or at their limit, nor a port that listens."""
    gateway = subprocess.Popen(
        [sys.executable, "-c", GATEWAY, *busy], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert gateway.stdout is not None
    with gateway, gateway.stdout:
        port, *pids = map(int, gateway.stdout.readline().split())
        assert len(pids) == 2
        assert all(resident_bytes(pid) > 0 for pid in pids)
        gateway.kill()
        gateway.wait()
        for _ in range(80):
            if not any(map(_lives, pids)):
                break
            time.sleep(0.1)
        assert not any(map(_lives, pids))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))


def _lives(pid: int) -> bool:
    """Tell whether a process runs; one that nobody has reaped does not."""
    return _state(pid) not in (b"", b"Z")


def _state(pid: int) -> bytes:
    """Return the letter of a process's state; nothing if there is none."""
    asked = ["ps", "-o", "stat=", "-p", str(pid)]
    return subprocess.run(asked, capture_output=True, check=False).stdout.strip()[:1]


@pytest.mark.parametrize("kind", ["grammar", "template", "image"])
def test_it_imports_nothing_that_is_slow_or_holds_a_device(kind: str) -> None:
    code = (
        f"import runpy, sys; runpy.run_path({sandbox_worker.__file__!r})['READY'][{kind!r}]();"
        "print(*{name.split('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, check=True)
    assert not {b"mlx", b"mlx_lm", b"gateway", b"torch"} & {*done.stdout.split()}
