"""Helpers that tests of several endpoints share."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
from httpx2 import AsyncClient, Response
from starlette.types import ASGIApp

from gateway.api.access import AccessRules, protect
from gateway.api.bodies import Bodies
from gateway.api.in_flight import InFlight
from gateway.api.traces import Tracer
from gateway.jobs.chat import CallDelta, Delta
from gateway.serving.rate_limit import Allowance
from tests.fakes import Gate, ScriptedChat, ScriptedRow


def protected(
    app: ASGIApp, in_flight: InFlight | None = None, tracer: Tracer | None = None, **rules: Any
) -> ASGIApp:
    """Put an app behind all that is around every request."""
    given = {
        "admin_key": None,
        "keys": (),
        "shares_prefixes": False,
        "hosts": (),
        "origins": (),
        "allowance": Allowance(requests=None, tokens=None),
        "max_header_bytes": 10_000,
        "send_timeout_s": 1,
        **rules,
    }
    return protect(
        app,
        AccessRules(**given),
        in_flight or InFlight(),
        Bodies(10**9),
        open_paths=("/x",),
        metered_paths=(),
        tracer=tracer,
    )


def messages(text: Any = "hi") -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def chat(text: Any = "hi", **more: Any) -> dict[str, Any]:
    return {"model": "writer", "messages": messages(text), **more}


# A request for text, by the path of its protocol.
ASK: dict[str, Callable[[Any], dict[str, Any]]] = {
    "/v1/chat/completions": chat,
    "/v1/completions": lambda text: {"model": "writer", "prompt": text, "max_tokens": 90},
    "/v1/responses": lambda text: {"model": "writer", "input": text},
    "/v1/messages": lambda text: {"model": "writer", "max_tokens": 90, "messages": messages(text)},
}


class ManyVoices(ScriptedChat):
    """Small letters are text, capitals are reasoning; `!` calls the clock."""

    def _next(self, number: int, row: ScriptedRow) -> Delta:
        return _voiced(super()._next(number, row))


def _voiced(delta: Delta) -> Delta:
    if delta.text == "!":
        return replace(delta, text="", call=CallDelta(0, "call_1", "clock", "{}"))
    if delta.text.isupper():
        return replace(delta, text="", reasoning=delta.text)
    return delta


FUNCTION = {"name": "go", "parameters": {"type": "object", "properties": {}}}
# The tool in its protocols.
TOOLS: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [{"type": "function", "function": FUNCTION}],
    "/v1/responses": [{"type": "function", **FUNCTION}],
    "/v1/messages": [{"name": "go", "input_schema": FUNCTION["parameters"]}],
}


def error_of(answer: Response, status: int = 400) -> dict[str, Any]:
    """Return the error of an answer of that status, in OpenAI's envelope."""
    assert answer.status_code == status, answer.text[:300]
    body: dict[str, Any] = answer.json()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    return body


def code_of(answer: Response) -> str:
    """Return the error's code, in OpenAI's envelope or Anthropic's."""
    return _code(answer.json()["error"])


def _code(error: dict[str, Any]) -> str:
    return str(error["code"] if "code" in error else error["details"]["error_code"])


@dataclass
class Streamed:
    """A stream as it was read: the lines of each event, and the signs of life."""

    answer: Response
    keep_alives: int = 0
    is_kept_first: bool = False  # a sign of life came before any event
    names: list[str] = field(default_factory=list)  # the names of Responses' and Messages' events
    events: list[dict[str, Any]] = field(default_factory=list)
    is_done: bool = False  # it ended as one that did not fail

    @property
    def error(self) -> str | None:
        """Return the code of the first error."""
        for event in self.events:
            if event.get("type") == "error" and "code" in event:
                return str(event["code"])
            if event.get("error"):
                return _code(event["error"])
        return None


async def stream(
    client: AsyncClient,
    path: str,
    body: dict[str, Any],
    *,
    on_kept_twice: Callable[[], None] = lambda: None,
) -> Streamed:
    """Ask for a stream, and read it whole; call back at its second sign of life."""
    async with client.stream("POST", path, json={**body, "stream": True}) as answer:
        told = Streamed(answer)
        if answer.status_code != 200:
            await answer.aread()
            return told
        assert answer.headers["content-type"].startswith("text/event-stream")
        async for line in answer.aiter_lines():
            if line in (": keep-alive", "event: ping"):
                told.is_kept_first |= not told.events
                told.keep_alives += 1
                if told.keep_alives == 2:
                    on_kept_twice()
            elif line.startswith("event: "):
                told.names.append(line.removeprefix("event: "))
            elif line == "data: [DONE]":
                told.is_done = True
            elif line.startswith("data: ") and '"ping"' not in line:
                told.events.append(orjson.loads(line.removeprefix("data: ")))
    assert not told.names or told.names == [event["type"] for event in told.events]
    told.is_done |= told.names[-1:] in (["response.completed"], ["message_stop"])
    return told


async def reached(gate: Gate) -> None:
    """Wait until the engine has come to a gate."""
    assert await asyncio.to_thread(gate.reached.wait, 60)


async def until_told(ask: Callable[[], Awaitable[object]]) -> None:
    """Ask again and again, until the answer is true."""
    async with asyncio.timeout(60):
        while not await ask():
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def held(gate: Gate, asking: Awaitable[Response]) -> AsyncIterator[asyncio.Task[Any]]:
    """Hold a request at a gate while entered, once the engine has reached the gate for it."""
    gate.close()
    task = asyncio.ensure_future(asking)
    await reached(gate)
    try:
        yield task
    finally:
        gate.open()
        await asyncio.wait([task])
