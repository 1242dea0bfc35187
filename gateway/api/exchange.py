"""The path of a request for text: its jobs run on a leased model, and their deltas become an answer
or a stream.
"""

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from gateway import clock
from gateway.api.in_flight import context_of, while_connected
from gateway.api.requests import (
    Service,
    first_names,
    ignored_header,
    named_header,
    serialize,
    time_stage,
)
from gateway.api.streams import ACCEPTED, COMMENT, DONE, EventStream, frame
from gateway.clock import Stage
from gateway.errors import BadRequest, GatewayError, SchemaViolated
from gateway.jobs.chat import Delta, GenerateJob, Sampling, Usage
from gateway.jobs.steps import SequenceParams
from gateway.registry import ChatSpec, Resolved
from gateway.serving.generation.answer_checks import AnswerChecker, Fit, choose_retried
from gateway.serving.generation.fan_out import generate_many
from gateway.wire.answers import Answer, AnswerWriter, Event
from gateway.wire.generation import SchemaVerdict
from gateway.wire.images import leave_images_out
from gateway.wire.validation import P
from gateway.wire.validation import Request as WireRequest

R = TypeVar("R", bound=WireRequest)


@dataclass(slots=True)
class _Run:
    usage: Usage  # usage of the prompts admitted so far
    updates: AsyncIterator[Usage | Delta]  # usage of later prompts, and all deltas
    checker: AnswerChecker | None = None

    async def verdict(self, index: int) -> SchemaVerdict | None:
        if self.checker is None:
            return None
        fit = await self.checker.check(index)
        _require_fit([fit])
        return _verdict_json(fit, self.checker.unenforced)


@dataclass(slots=True)
class _Attempt:
    choices: list[list[Delta]]
    usage: Usage
    fits: list[Fit | None]
    unenforced: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A request for text, its jobs, and the writer of its answer."""

    service: Service
    request: WireRequest
    spec: ChatSpec
    jobs: Sequence[GenerateJob]
    writer: AnswerWriter
    is_streamed: bool
    is_checked: bool = True  # True: there is one job, and its answer is checked
    keep: Callable[[], None] = lambda: None  # stores the answer, before the answer's end is sent
    headers: dict[str, str] = field(default_factory=dict)

    async def respond(self, request: Request) -> ASGIApp:
        if not self.is_streamed:
            async with while_connected(request.receive):
                body = await self._answer_whole()
            return Response(body, media_type="application/json", headers=self.headers)
        ping = self.writer.ping
        stream = EventStream(
            self._frames(),
            self.headers,
            request,
            write_error=lambda error: b"".join(map(self._frame, self.writer.fail(error))),
            keep_alive=COMMENT if ping is None else self._frame(ping),
        )
        return await stream.prime(self.service.rules.stream_open_after_s)

    async def count_tokens(self, request: Request) -> int:
        job = self.jobs[0]
        lease = self.service.lease(self.spec, job.caller, self.request)
        async with while_connected(request.receive), lease as batcher:
            return await batcher.count_tokens(job)

    async def _answer_whole(self) -> bytes:
        job = self.jobs[0]
        answer = await self._generate(self.jobs)
        invalid = choose_retried(job, answer.fits)
        if invalid:
            # Without time or memory for a retry, the invalid choices are sent.
            with contextlib.suppress(GatewayError):
                retry = await self._generate([replace(job, n=len(invalid))])
                answer.usage = _add_usage(answer.usage, retry.usage)
                for index, choice, fit in zip(invalid, retry.choices, retry.fits, strict=True):
                    answer.choices[index], answer.fits[index] = choice, fit
        _require_fit(answer.fits)
        self.headers.update(_schema_valid_header(answer))
        started = clock.now()
        body = await serialize(lambda: self._write(answer), _count_parts(job, answer))
        self.keep()
        job.caller.timings.add(Stage.SERIALIZE, started)
        return body

    def _write(self, answer: _Attempt) -> bytes:
        verdicts = [_verdict_json(fit, answer.unenforced) for fit in answer.fits]
        return orjson.dumps(self.writer.whole(Answer(answer.choices, answer.usage, verdicts)))

    async def _generate(self, jobs: Sequence[GenerateJob]) -> _Attempt:
        choices: list[list[Delta]] = [[] for job in jobs for _ in range(job.n)]
        async with self._run(jobs) as run:
            usage = run.usage
            async for update in run.updates:
                usage = _add_usage(usage, update)
                if isinstance(update, Delta):
                    choices[update.index].append(update)
        if run.checker is None:
            return _Attempt(choices, usage, [None] * len(choices))
        fits = [await run.checker.check(index) for index in range(len(choices))]
        return _Attempt(choices, usage, fits, run.checker.unenforced)

    async def _frames(self) -> AsyncGenerator[bytes, None]:
        writer = self.writer
        has_begun = False
        async with self._run(self.jobs) as run:
            yield ACCEPTED
            usage = run.usage
            async for update in run.updates:
                usage = _add_usage(usage, update)
                if isinstance(update, Usage):
                    continue
                # `begin` needs the number of cached tokens, which the first delta has.
                if not has_begun:
                    has_begun = True
                    for event in writer.begin(usage):
                        yield self._frame(event)
                is_last = update.finish_reason is not None
                verdict = await run.verdict(update.index) if is_last else None
                for event in writer.add(update, verdict):
                    yield self._frame(event)
        # The response is kept first, because a client may continue from it at once.
        last_events = writer.end(usage)
        self.keep()
        for event in last_events:
            yield self._frame(event)
        if not writer.names_events:
            yield DONE

    @contextlib.asynccontextmanager
    async def _run(self, jobs: Sequence[GenerateJob]) -> AsyncIterator[_Run]:
        """Run the jobs on a leased model, and set the headers known once a job is admitted."""
        async with self.service.lease(self.spec, jobs[0].caller, self.request) as batcher:
            if self.is_checked:
                async with batcher.generate(jobs[0]) as generation, aclosing(generation.deltas):
                    self.headers.update(_answer_headers(generation.checker, generation.params))
                    if generation.params.thinking_budget is None:
                        self._name_ignored_budget()
                    self.writer.accept(generation.params.sampling)
                    yield _Run(generation.usage, generation.deltas, generation.checker)
            else:
                async with aclosing(generate_many(batcher, jobs)) as updates:
                    usage = await anext(updates)
                    assert isinstance(usage, Usage)
                    yield _Run(usage, updates)

    def _name_ignored_budget(self) -> None:
        name, header = self.request.param_of("thinking_budget"), "x-gateway-ignored"
        names = self.headers.get(header, "").split(",")
        if self.request.thinking_budget is not None and name not in names:
            self.headers[header] = ",".join([*filter(None, names), name])

    def _frame(self, event: Event) -> bytes:
        name = event["type"] if self.writer.names_events else ""
        return frame(orjson.dumps(event), name)


async def read_exchange(
    service: Service,
    request: Request,
    shape: type[R],
    translate: Callable[[R], Exchange],
    *,
    is_large: Callable[[R], bool] = lambda _: False,
) -> Exchange:
    """Read and translate a request, on a thread if `is_large` says that translating takes long."""
    body = await service.read_body(request)
    with time_stage(request, Stage.PARSE):
        parsed = await service.take(request, body, shape)
        asked = parsed.request
        if b"image" in body and not service.knows_images(getattr(asked, "model", None)):
            await service.inputs.look()
        exchange = await service.run_on_body(body, translate, asked, is_large=is_large(asked))
    # Images of kept responses are not in this body, but take as much memory.
    images = {id(image.data): len(image.data) for job in exchange.jobs for image in job.images}
    context_of(request).body.count(max(len(body), sum(images.values())))
    exchange.headers.update(ignored_header(parsed.ignored))
    return exchange


def without_images(
    service: Service,
    request: Request,
    spec: ChatSpec,
    turns: Sequence[P],
    *,
    continues: bool = False,
) -> tuple[Sequence[P], dict[str, str]]:
    """Return the conversation, without images if the model reads none and the caller allows it."""
    name = "x-gateway-leave-out-images"
    given = context_of(request).headers.get(name.encode())
    choices = {None: service.rules.leave_out_images, b"true": True, b"false": False}
    if given not in choices:
        raise BadRequest(f"The header {name} should be true or false.", param=name)
    if not choices[given] or service.reads_images(spec):
        return turns, {}
    kept, count = leave_images_out(turns, continues=continues)
    return kept, {"x-gateway-images-left-out": str(count)} if count else {}


def default_sampling(spec: ChatSpec) -> Sampling:
    """Return the model's sampling values; those not in models.yaml are listed as `unset`."""
    values = spec.sampling.model_dump(exclude={"max_tokens"})
    unset = frozenset(name for name, value in values.items() if value is None)
    return Sampling(**{name: values[name] for name in values.keys() - unset}, unset=unset)


def template_args(resolved: Resolved, spec: ChatSpec) -> dict[str, Any]:
    """Return the chat template's arguments; an alias's `thinking` wins over the model's."""
    thinking = spec.thinking
    if resolved.alias is not None and resolved.alias.thinking is not None:
        thinking = resolved.alias.thinking
    if thinking is None:
        return dict(spec.chat_template_kwargs)
    return {"enable_thinking": thinking, **spec.chat_template_kwargs}


def thinking_budgets(spec: ChatSpec) -> dict[str, int]:
    return spec.thinking_budget.model_dump(exclude_none=True)


def _count_parts(job: GenerateJob, answer: _Attempt) -> int:
    """Count deltas and logprobs, which decide how long it takes to write the answer."""
    deltas = sum(map(len, answer.choices))
    if job.logprobs is None:
        return deltas
    tokens = answer.usage.completion_tokens
    if job.echo:
        tokens += answer.usage.prompt_tokens
    return deltas + tokens * (1 + job.logprobs)


def _add_usage(usage: Usage, update: Usage | Delta) -> Usage:
    if isinstance(update, Delta):
        prompt_tokens, completion_tokens, image_tokens = 0, update.tokens, 0
    else:
        prompt_tokens, completion_tokens = update.prompt_tokens, update.completion_tokens
        image_tokens = update.image_tokens
    return Usage(
        prompt_tokens=usage.prompt_tokens + prompt_tokens,
        completion_tokens=usage.completion_tokens + completion_tokens,
        cached_tokens=usage.cached_tokens + update.cached_tokens,
        reasoning_tokens=usage.reasoning_tokens + update.reasoning_tokens,
        kept_tokens=usage.kept_tokens + update.kept_tokens,
        image_tokens=usage.image_tokens + image_tokens,
    )


def _require_fit(fits: Sequence[Fit | None]) -> None:
    if Fit.BROKEN in fits:
        raise SchemaViolated


def _verdict_json(fit: Fit | None, unenforced: Sequence[str]) -> SchemaVerdict | None:
    if fit is None or (fit is Fit.VALID and not unenforced):
        return None
    return {"unenforced": list(first_names(unenforced)), "schema_valid": fit.is_valid}


def _answer_headers(checker: AnswerChecker, params: SequenceParams) -> dict[str, str]:
    headers = named_header("x-gateway-unenforced", checker.unenforced)
    if params.calls_are_text:
        headers["x-gateway-tool-format"] = "unknown"
    if params.thoughts_are_text:
        headers["x-gateway-reasoning-format"] = "unknown"
    if params.reads_whole:
        headers["x-gateway-answer-format"] = "response_template"
    may_think, budget = params.is_thinking or params.may_think, params.thinking_budget
    if may_think and budget is not None and budget >= params.max_tokens:
        headers["x-gateway-thinking-budget"] = "takes-max-tokens"
    return headers


def _schema_valid_header(answer: _Attempt) -> dict[str, str]:
    verdicts = [fit.is_valid for fit in answer.fits if fit is not None]
    if not verdicts or (all(verdicts) and not answer.unenforced):
        return {}
    value = "true"
    if False in verdicts:
        value = "false"
    elif None in verdicts:
        value = "unknown"
    return {"x-gateway-schema-valid": value}
