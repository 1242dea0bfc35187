"""The real gateway, in a process of its own, asked by many who mean it ill."""

import asyncio
import contextlib
import random
import time
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import orjson
import pytest
import yaml

from gateway.api.endpoints import ENDPOINTS
from gateway.wire.anthropic import error_status
from tests.engine.vision.harness import write_seeing
from tests.fuzz.asking import check_error
from tests.fuzz.hostile import Sent, hostile
from tests.processes import DEMO, Served, command, started
from tests.provoked.readings import settled

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

POSTS = {each.bare_path: each for each in ENDPOINTS if each.method == "POST"}
SHORT, LONG = 100, 20_000
AT_ONCE = 6
REQUEST_S = 20  # the gateway gives a request this long, whatever its own header asks for
ANSWERED_S = 6 * REQUEST_S
HEALTHY_S = 5.0  # a supervisor then counts a failure
ALIASES = {"GATEWAY_ALL_MINILM_L6_V2_ALIASES": "embed", "GATEWAY_DEMO_CHAT_ALIASES": "writer"}


async def ask(url: str, sent: Sent) -> tuple[int, bytes] | None:
    """Send a request as it says, and return the answer's status and body; None if it left.

    Bytes after its body may meet a connection that was closed behind its answer, which is lost.
    """
    parts = urlsplit(url)
    head = (
        f"POST /v1{sent.path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(sent.body)}\r\n"
    )
    head += "".join(f"{name}: {value}\r\n" for name, value in sent.headers.items())
    whole = head.encode() + b"Connection: close\r\n\r\n" + sent.body + sent.after
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        for start in range(0, len(whole), size := -(-len(whole) // sent.pieces)):
            writer.write(whole[start : start + size])
            await writer.drain()
        if sent.is_left:
            return None
        async with asyncio.timeout(ANSWERED_S):
            answer = await reader.read()
    except ConnectionError:
        if not sent.after:
            raise
        return None
    finally:
        writer.close()
    first, _, body = answer.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" in first.lower():
        body = unchunked(body)
    return int(first.split()[1]), body


def unchunked(body: bytes) -> bytes:
    """Put a chunked body together. Raises ValueError for one that was cut short."""
    whole = b""
    while True:
        size, _, body = body.partition(b"\r\n")
        if (length := int(size, 16)) == 0:
            return whole
        whole, body = whole + body[:length], body[length + 2 :]


def check(sent: Sent, status: int, body: bytes) -> None:
    """Hold an answer to the documentation: a status, the envelope, and no fault of ours."""
    endpoint = POSTS[sent.path]
    statuses = {int(each.status) for each in endpoint.all_errors}
    if sent.path == "/messages":
        statuses = {error_status(each) for each in endpoint.all_errors}
    assert status in {*endpoint.statuses, *statuses}, status
    # The model's fault: its answer breaks a schema that has to be held.
    assert status != 500 or b'"schema_violated"' in body, body
    if status != 200:
        check_error(orjson.loads(body))
    elif body.startswith((b"data: ", b"event: ", b": ")):
        events = (line[6:] for line in body.split(b"\n") if line.startswith(b"data: {"))
        for event in map(orjson.loads, events):
            if error := event.get("error"):
                check_error(event if sent.path == "/messages" else {"error": error})
                assert b"engine_failed" not in orjson.dumps(event), event
    else:
        assert "error" not in orjson.loads(body) or sent.path == "/responses"


async def pinged(url: str, worst: list[float]) -> None:
    """Ask for /health, again and again, and note how long it took."""
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        while True:
            started = time.perf_counter()
            assert (await client.get("/health")).status_code == 200
            worst.append(time.perf_counter() - started)
            await asyncio.sleep(0.05)


async def stormed(served: Served, requests: int) -> Counter[tuple[str, int | None]]:
    """Send this number of requests, some at once; count their answers by shape and status."""
    choose = random.Random(requests)
    answers: Counter[tuple[str, int | None]] = Counter()
    left = requests

    async def work() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            sent = hostile(choose)
            try:
                answer = await ask(served.url, sent)
                if answer is not None:
                    check(sent, *answer)
            except Exception as error:
                shown = sent.body[:300] + b" ... " + sent.body[-200:]
                error.add_note(f"{sent.shape} {sent.path} {sent.headers} {sent.after!r}: {shown!r}")
                raise
            answers[sent.shape, None if answer is None else answer[0]] += 1

    async with asyncio.TaskGroup() as workers:
        for _ in range(AT_ONCE):
            workers.create_task(work())
    return answers


@pytest.mark.parametrize("requests", [SHORT, pytest.param(LONG, marks=pytest.mark.soak)])
async def test_whoever_means_ill_is_answered_and_nothing_is_left(
    requests: int, tmp_path: Path
) -> None:
    """Each answer has a documented status, and its error the envelope; /health answers all along;
    the process is the same at the end, with nothing under way and no traceback in its log.
    """
    worst: list[float] = []
    given = {**ALIASES, "GATEWAY_REQUEST_TIMEOUT_S": str(REQUEST_S)}
    write_seeing("qwen3_vl", tmp_path / "seeing")
    models = yaml.safe_load(DEMO.read_text())
    for name in ("chat", "vision"):
        models["models"][f"demo-{name}"]["source"] = f"path:{DEMO.parent / name}"
    models["models"]["seeing"] = {"kind": "chat", "source": "path:seeing", "preload": True}
    (tmp_path / "models.yaml").write_text(yaml.safe_dump(models))
    with started(command("serve"), tmp_path, **given) as served:
        before = await settled(served.url)
        pinging = asyncio.create_task(pinged(served.url, worst))
        answers = await stormed(served, requests)
        pinging.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await pinging
        after = await settled(served.url, before.tasks)
        assert served.process.poll() is None
        log = served.log.read_text()
    print(f"{requests} requests, worst /health {max(worst):.2f} s", *before.told(after), sep="\n")
    for (shape, status), count in sorted(answers.items(), key=str):
        print(f"  {shape} {status}: {count}")
    assert "Traceback" not in log, log[log.index("Traceback") - 500 :][:3000]
    assert "batch_fault" not in log, "a pass over several rows threw"
    assert max(worst) < HEALTHY_S
    assert not any(after.work.values()), after.work
    assert after.values["gateway_body_bytes"] == 0
    assert after.tasks <= before.tasks
