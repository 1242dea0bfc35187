"""Traces: a span for each request, its stages as children, sent to a collector."""

import asyncio
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import structlog
from httpx2 import Response
from starlette.types import Message, Receive, Scope, Send

from gateway.api.in_flight import InFlight
from gateway.api.traces import Tracer
from gateway.app import gateway as app
from gateway.registry import Catalog
from tests.api.harness import protected, reached
from tests.collector import Taken, collecting
from tests.fakes import ScriptedChat, ScriptedEngines
from tests.processes import environment
from tests.serving_app import served
from tests.waiting import until

pytestmark = pytest.mark.anyio

SECRET = "the colour of my secret"
CHAT: dict[str, Any] = {"model": "gpt", "messages": [{"role": "user", "content": SECRET}]}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE_ID, PARENT_ID = PARENT.split("-")[1:3]
STAGES = ["parse", "load", "tokenise", "queue", "lane", "prefill", "decode"]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[Taken]:
    """Give the spans that a collector takes from gateways started from now on."""
    with collecting() as taken:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", taken.endpoint)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        yield taken


def exporting() -> list[threading.Thread]:
    """List OpenTelemetry's threads: they draw random numbers, as generators of other tests do."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("OtelBatch")]


async def asked(
    models: Catalog, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> Response:
    """Ask a gateway, and return once it has ended and so sent its traces."""
    async with served(models, ScriptedEngines()) as client:
        return await client.post(path, json=body, headers=headers)


async def test_an_answer_is_a_span_with_its_stages_as_children(
    models: Catalog, taken: Taken
) -> None:
    """Names follow HTTP's and GenAI's conventions; the stages lie within the request."""
    body = {**CHAT, "temperature": 0.5, "max_completion_tokens": 3, "n": 2, "seed": 7}
    answer = await asked(models, "/v1/chat/completions", body, {"x-request-id": "mine"})
    assert answer.status_code == 200
    span = taken.server()
    attributes = dict(span.attributes)
    assert attributes.pop("user_agent.original").startswith("python-httpx")
    assert attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "http.response.header.x-request-id": ["mine"],
        "network.protocol.version": "1.1",
        "server.address": "127.0.0.1",
        "server.port": answer.request.url.port,
        "url.path": "/v1/chat/completions",
        "url.scheme": "http",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "mlx_gateway",
        "gen_ai.request.model": "gpt",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.seed": 7,
        "gen_ai.response.model": "writer",
        "gen_ai.response.finish_reasons": ["length", "length"],
        "gen_ai.usage.input_tokens": len(SECRET),
        "gen_ai.usage.output_tokens": 6,
    }
    assert (span.name, span.is_error, span.parent_id) == ("POST /v1/chat/completions", False, "")
    assert span.resource["service.name"] == "mlx-gateway"
    children = taken.children(span)
    assert [child.name for child in children] == [*STAGES, "serialise"]
    for child in children:
        assert span.started <= child.started <= child.ended <= span.ended
        assert child.trace_id == span.trace_id
    for earlier, later in pairwise(children):
        assert earlier.ended <= later.started + 1_000  # exact to the microsecond


async def test_the_stages_are_those_of_the_servers_timings(models: Catalog, taken: Taken) -> None:
    """Nothing is timed twice."""
    answer = await asked(models, "/v1/embeddings", {"model": "embed", "input": ["a", SECRET]})
    told = dict(re.findall(r"(\w+);dur=([\d.]+)", answer.headers["server-timing"]))
    span = taken.server()
    for child in taken.children(span):
        seconds = pytest.approx(float(told[child.name]), abs=0.006)
        assert (child.ended - child.started) / 1e6 == seconds
    assert (span.ended - span.started) / 1e6 >= float(told["total"]) - 0.006
    assert span.attributes["gen_ai.request.model"] == "embed"
    assert span.attributes["gen_ai.response.model"] == "org/embed"


RERANK = {"model": "judge", "query": "abc", "documents": ["a", "b"]}
SCORE = {"model": "judge", "text_1": "abc", "text_2": ["a"]}
COMPLETION = {"model": "writer", "prompt": ["abc", "de"]}


@pytest.mark.parametrize(
    ("path", "body", "operation", "tokens"),
    [
        ("/v1/embeddings", {"model": "embed", "input": ["a", "bc"]}, "embeddings", {"input": 3}),
        ("/v1/rerank", RERANK, "rerank", {"input": 12}),
        ("/v1/score", SCORE, "rerank", {"input": 6}),
        ("/v1/completions", COMPLETION, "text_completion", {"input": 5, "output": 7}),
        ("/v1/responses", {"model": "writer", "input": "abc"}, "chat", {"input": 3, "output": 4}),
    ],
)
async def test_every_endpoint_of_a_model_has_an_operation_and_its_tokens(
    models: Catalog, taken: Taken, path: str, body: Any, operation: str, tokens: dict[str, int]
) -> None:
    assert (await asked(models, path, body)).status_code == 200
    attributes = taken.server().attributes
    assert attributes["gen_ai.operation.name"] == operation
    found = {name: value for name, value in attributes.items() if ".usage." in name}
    assert found == {f"gen_ai.usage.{name}_tokens": count for name, count in tokens.items()}


async def test_the_callers_trace_goes_on(models: Catalog, taken: Taken) -> None:
    headers = {"traceparent": PARENT, "tracestate": "a=b"}
    answer = await asked(models, "/v1/chat/completions", CHAT, headers)
    span = taken.server()
    assert (span.trace_id, span.parent_id) == (TRACE_ID, PARENT_ID)
    assert answer.headers["traceresponse"] == f"00-{TRACE_ID}-{span.span_id}-01"
    assert {child.trace_id for child in taken.children(span)} == {TRACE_ID}


@pytest.mark.parametrize("header", ["nonsense", "00-" + "a" * 5000, PARENT + "\u00e9"])
async def test_a_broken_traceparent_begins_a_trace(
    models: Catalog, taken: Taken, header: str
) -> None:
    async with served(models, ScriptedEngines()) as client:
        raw = header.encode("latin-1")
        answer = await client.get("/v1/models", headers={b"traceparent": raw})
    assert answer.status_code == 200
    span = taken.server()
    assert span.parent_id == ""
    assert answer.headers["traceresponse"].split("-")[1] == span.trace_id


async def test_a_caller_who_samples_nothing_has_no_spans(models: Catalog, taken: Taken) -> None:
    headers = {"traceparent": PARENT[:-2] + "00"}
    answer = await asked(models, "/v1/chat/completions", CHAT, headers)
    assert answer.headers["traceresponse"].startswith(f"00-{TRACE_ID}-")
    assert answer.headers["traceresponse"].endswith("-00")
    assert taken.spans == []


async def test_a_stream_is_one_span_to_its_end(models: Catalog, taken: Taken) -> None:
    answer = await asked(models, "/v1/chat/completions", {**CHAT, "stream": True})
    assert answer.headers["traceresponse"]
    span = taken.server()
    assert span.attributes["gen_ai.request.stream"] is True
    assert span.attributes["gen_ai.response.finish_reasons"] == ["stop"]
    assert span.attributes["gen_ai.usage.output_tokens"] == len(SECRET) + 1
    assert [child.name for child in taken.children(span)] == STAGES


async def test_an_error_of_ours_is_one_and_a_clients_is_none(models: Catalog, taken: Taken) -> None:
    async with served(models, ScriptedEngines()) as client:
        await client.post("/v1/chat/completions", json={**CHAT, "model": "nobody"})
        await client.post("/v1/chat/completions", content=b"{")
        await client.get("/v1/nowhere", headers={"x-request-id": "unknown"})
        await client.request("BREW", "/v1/models")
        slow = {"x-gateway-timeout-s": "0.000001"}
        await client.post("/v1/chat/completions", json=CHAT, headers=slow)
    told = {
        span.attributes["error.type"]: (
            span.name, span.attributes["http.response.status_code"], span.is_error,
        )
        for span in taken.servers()
    }  # fmt: skip
    assert told == {
        "model_not_found": ("POST /v1/chat/completions", 404, False),
        "invalid_request_error": ("POST /v1/chat/completions", 400, False),
        "deadline_exceeded": ("POST /v1/chat/completions", 504, True),
        "unknown_url": ("GET", 404, False),
        "method_not_allowed": ("HTTP /v1/models", 405, False),
    }


async def test_a_stream_that_fails_after_its_200_is_an_error(models: Catalog, taken: Taken) -> None:
    engines = ScriptedEngines()
    engines.chat.fail_at_step = 3
    async with served(models, engines) as client:
        answer = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
    assert answer.status_code == 200
    assert '"error"' in answer.text
    span = taken.server()
    assert span.is_error
    assert span.attributes["http.response.status_code"] == 200
    assert span.attributes["error.type"] == "engine_failed"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_who_leaves_ends_the_span_at_the_stage_it_left(
    models: Catalog, taken: Taken, stream: bool
) -> None:
    engines = ScriptedEngines()
    async with served(models, engines) as client:
        await client.post("/v1/chat/completions", json=CHAT)  # loads it
        engines.chat.gate.close()
        body = {**CHAT, "stream": stream}
        leaver = asyncio.ensure_future(client.post("/v1/chat/completions", json=body))
        await reached(engines.chat.gate)
        leaver.cancel()
        await until(lambda: len(taken.servers()) == 2)
        engines.chat.gate.open()
    span = taken.servers()[-1]
    assert span.attributes["error.type"] == "client_disconnected"
    assert not span.is_error
    assert "http.response.status_code" not in span.attributes
    last = taken.children(span)[-1]
    assert last.name in ("queue", "prefill")
    assert last.attributes == {"error.type": "client_disconnected"}
    assert last.ended == span.ended


async def test_no_span_has_content(models: Catalog, taken: Taken) -> None:
    form = {"name": "s", "schema": {"type": "object", "title": SECRET}}
    bodies = {
        "/v1/chat/completions": {
            **CHAT,
            "stop": [SECRET],
            "user": SECRET,
            "tools": [{"type": "function", "function": {"name": "f", "description": SECRET}}],
            "response_format": {"type": "json_schema", "json_schema": form},
        },
        "/v1/embeddings": {"model": "embed", "input": SECRET},
        "/v1/rerank": {"model": "judge", "query": SECRET, "documents": [SECRET]},
        "/v1/responses": {"model": "writer", "input": SECRET, "instructions": SECRET},
        "/v1/decisions": {
            "model": "writer",
            "input": SECRET,
            "questions": [{"type": "predicate", "instructions": SECRET}],
        },
    }
    engines = ScriptedEngines(chat=ScriptedChat(max_context=1000))
    async with served(models, engines) as client:
        for path, body in bodies.items():
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, answer.text
    assert len(taken.servers()) == len(bodies)
    assert SECRET.encode() not in b"".join(taken.bodies)


async def test_probes_and_scrapes_have_no_traces(models: Catalog, taken: Taken) -> None:
    """They come every few seconds; the list of models has a trace."""
    async with served(models, ScriptedEngines()) as client:
        for path in ("/health", "/ready", "/metrics", "/v1/metrics"):
            assert "traceresponse" not in (await client.get(path)).headers
        await client.get("/v1/models")
    assert [span.name for span in taken.spans] == ["GET /v1/models"]


async def test_the_log_has_the_traces_id(models: Catalog, taken: Taken) -> None:
    with structlog.testing.capture_logs([structlog.contextvars.merge_contextvars]) as lines:
        await asked(models, "/v1/chat/completions", CHAT, {"traceparent": PARENT})
    [line] = [each for each in lines if each["event"] == "request" and "model" in each]
    assert line["trace_id"] == TRACE_ID


async def test_a_collector_that_does_not_answer_costs_spans_and_nothing_else(
    models: Catalog, taken: Taken, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "FLUSH_S", 0.2)
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "16")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "8")
    taken.may_answer.clear()
    with structlog.testing.capture_logs() as lines:
        async with asyncio.timeout(60):
            async with served(models, ScriptedEngines()) as client:
                for _ in range(20):
                    answer = await client.post("/v1/chat/completions", json=CHAT)
                    assert answer.status_code == 200
    assert len(taken.bodies) <= 2  # the second would be sent after the first was answered
    told = [line for line in lines if line["event"] in ("traces_failing", "traces_cut_short")]
    assert [line["event"] for line in told] == ["traces_failing", "traces_cut_short"]
    assert "dropping" in told[0]["detail"]
    taken.may_answer.set()
    await until(lambda: not exporting())


async def test_a_collector_that_is_not_there_is_told_of_in_the_log_of_the_gateway(
    models: Catalog, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(app, "FLUSH_S", 0.2)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with structlog.testing.capture_logs() as lines:
        async with served(models, ScriptedEngines()) as client:
            assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
            await until(lambda: "traces_failing" in [line["event"] for line in lines])
    assert capfd.readouterr().err == ""
    await until(lambda: not exporting())


URL = "OTEL_EXPORTER_OTLP_ENDPOINT"
WITHOUT_ENDPOINT: list[dict[str, str]] = [
    {},
    {URL: "", "OTEL_SERVICE_NAME": "x"},
    {URL: "http://127.0.0.1:9", "OTEL_SDK_DISABLED": "true"},
    {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x", "OTEL_TRACES_EXPORTER": "none"},
]


def test_without_an_endpoint_nothing_of_opentelemetry_is_imported() -> None:
    program = (
        "import os, sys\n"
        "import gateway.cli.serve, gateway.app.engines, gateway.api.app\n"
        "from gateway.app.gateway import _make_tracer\n"
        f"for variables in {WITHOUT_ENDPOINT}:\n"
        "    before = dict(os.environ)\n"
        "    os.environ.update(variables)\n"
        "    assert _make_tracer() is None, variables\n"
        "    assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
        "    for name in variables.keys() - before.keys():\n"
        "        del os.environ[name]\n"
    )
    clean = {k: v for k, v in environment().items() if not k.startswith("OTEL_")}
    subprocess.run([sys.executable, "-c", program], env=clean, check=True)


async def test_without_an_endpoint_a_request_has_neither_header_nor_span(
    models: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    answer = await asked(models, "/v1/chat/completions", CHAT, {"traceparent": PARENT})
    assert "traceresponse" not in answer.headers


async def test_an_endpoint_without_the_extra_is_warned_of(
    models: Catalog, taken: Taken, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "gateway.api.traces", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with structlog.testing.capture_logs() as lines:
        answer = await asked(models, "/v1/chat/completions", CHAT)
    assert answer.status_code == 200
    [line] = [line for line in lines if line["event"] == "traces_unavailable"]
    assert "mlx-gateway[otel]" in line["hint"]
    assert taken.spans == []


async def test_an_answer_that_a_shutdown_cuts_is_an_error(taken: Taken) -> None:
    has_begun = asyncio.Event()

    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        has_begun.set()
        await asyncio.Event().wait()

    async def receive() -> Message:
        raise AssertionError

    async def send(message: Message) -> None: ...

    tracer = Tracer({}, frozenset())
    tracer.open()
    in_flight = InFlight()
    guarded = protected(stream, in_flight, tracer=tracer)
    scope: Scope = {"type": "http", "method": "GET", "path": "/x", "query_string": b""}
    scope.update({"http_version": "2", "scheme": "http", "headers": []})
    scope["server"] = ("/run/gateway.sock", None)
    cut = asyncio.ensure_future(guarded(scope, receive, send))
    await has_begun.wait()
    in_flight.cancel()
    await asyncio.gather(cut, return_exceptions=True)
    await asyncio.to_thread(tracer.close)
    span = taken.server()
    assert span.is_error
    assert span.attributes["error.type"] == "cancelled"
    assert span.attributes["http.response.status_code"] == 200
    assert "server.port" not in span.attributes
