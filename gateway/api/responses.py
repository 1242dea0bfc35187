"""POST /v1/responses, without state: what was answered before is not kept."""

import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from gateway import metrics
from gateway.api.chat import counted, defaults, template_args
from gateway.api.service import Service, noted
from gateway.api.streams import ACCEPTED, EventStream, frame, while_connected
from gateway.errors import GatewayError, UnknownUrl
from gateway.jobs import GenerateJob, Stage
from gateway.registry import ChatSpec
from gateway.wire import responses as wire
from gateway.wire.response_events import Answer, Event
from gateway.wire.sampling import tier


class Responses:
    """Read, lease, ask, answer: whole or as a stream, from the same events."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def answer(self, request: Request) -> ASGIApp:
        """Answer a conversation."""
        service, rules = self._service, self._service.rules
        read = await service.read(request, wire.ResponsesRequest, wire.FIELDS)
        asked = read.request
        resolved, spec = service.chat_spec(asked.model)
        job = wire.to_job(
            asked,
            service.caller(request, tier(asked.service_tier)),
            defaults(spec),
            max_tokens=spec.sampling.max_tokens,
            template_args=template_args(resolved, spec),
            max_chars=rules.max_input_chars,
        )
        response_id = f"resp_{secrets.token_hex(24)}"
        created = int(time.time())
        answer = Answer(wire.described(asked, job, response_id=response_id, created=created))
        headers = noted(read.ignored)
        if not asked.stream:
            body = await while_connected(request.receive, self._whole(spec, job, answer))
            return Response(body, media_type="application/json", headers=headers)
        events = self._framed(spec, job, answer)
        stream = EventStream(
            events,
            headers,
            request.receive,
            told=lambda error: b"".join(map(named, [*answer.begin(), *answer.fail(error)])),
        )
        return await stream.primed(rules.stream_open_after_s)

    async def missing(self, request: Request) -> Response:
        """Refuse what only a gateway that keeps responses could answer."""
        raise UnknownUrl(
            f"Response with id '{request.path_params['name'].split('/')[0]}' not found: this "
            "gateway keeps no responses.",
            param="response_id",
            code="response_not_found",
        )

    async def _whole(self, spec: ChatSpec, job: GenerateJob, answer: Answer) -> bytes:
        async with aclosing(self._events(spec, job, answer)) as events:
            async for _ in events:
                pass
        started = metrics.now()
        body = orjson.dumps(answer.whole())
        job.caller.timings.add(Stage.SERIALISE, metrics.now() - started)
        return body

    async def _framed(
        self, spec: ChatSpec, job: GenerateJob, answer: Answer
    ) -> AsyncGenerator[bytes, None]:
        """Frame the events. A failure after the first of them is an event too."""
        has_begun = False
        try:
            async with aclosing(self._events(spec, job, answer)) as events:
                async for event in events:
                    has_begun = has_begun or event is not None
                    yield ACCEPTED if event is None else named(event)
        except GatewayError as error:
            if not has_begun:
                raise
            for event in answer.fail(error):
                yield named(event)

    async def _events(
        self, spec: ChatSpec, job: GenerateJob, answer: Answer
    ) -> AsyncGenerator[Event | None, None]:
        """Give None when the request is accepted, then the events: the first of them with the
        first delta.
        """
        with _in_our_words():
            async with (
                self._service.writer(spec, job.caller) as batcher,
                batcher.generate(job) as generation,
                aclosing(generation.deltas) as deltas,
            ):
                yield None
                usage = generation.usage
                is_first = True
                async for delta in deltas:
                    if is_first:
                        is_first = False
                        for event in answer.begin():
                            yield event
                    usage = counted(usage, delta)
                    for event in answer.add(delta):
                        yield event
        for event in answer.end(usage, int(time.time())):
            yield event


def named(event: Event) -> bytes:
    """Write an event with its type as the frame's name."""
    kind: str = event["type"]
    return b"event: " + kind.encode() + b"\n" + frame(orjson.dumps(event))


@contextlib.contextmanager
def _in_our_words() -> Iterator[None]:
    """Name the fields as this endpoint does in what the floors below refuse."""
    try:
        yield
    except GatewayError as error:
        if error.param == "messages":
            error.param = "input"
        elif error.param == "response_format":
            error.param = "text.format.schema"
            error.code = error.code or "invalid_json_schema"
        raise
