"""/tokenize, /detokenize and /tokenizer_info for chat models."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from gateway.api.in_flight import while_connected
from gateway.api.requests import Service, ignored_header, reply, time_stage
from gateway.clock import Stage
from gateway.errors import BadRequest
from gateway.registry import ChatSpec
from gateway.serving.admission import until_deadline
from gateway.serving.generation.batcher import GenerationBatcher
from gateway.serving.tokenize import Kind, prompt_kind
from gateway.wire import tokenization as wire
from gateway.wire.validation import Request as WireRequest

T = TypeVar("T")


async def tokenize(service: Service, request: Request) -> Response:
    body = await service.read_body(request)
    with time_stage(request, Stage.PARSE):
        parsed = await service.take(request, body, wire.TokenizeRequest)
        asked = parsed.request
        _, spec = service.chat_spec(asked.model, "tokenizing")
        max_chars = service.rules.max_input_chars
        translate = partial(wire.to_job, asked, service.caller(request), max_chars=max_chars)
        translate = partial(translate, images=service.image_reader(spec))
        job = await service.run_on_body(body, translate)
        if job.images:
            place = job.images[0].place
            raise BadRequest(f"Invalid '{place}': images are not tokenized.", param=place)
    async with _leased(service, request, spec, asked) as batcher:
        tokens = batcher.engine.tokens

        def encode() -> tuple[list[int], list[str] | None]:
            ids = tokens.tokenize(
                job, special=asked.add_special_tokens, asking=asked.add_generation_prompt
            )
            return ids, tokens.pieces(ids) if asked.return_token_strs else None

        ids, pieces = await _run(service, request, encode, prompt_kind(job))
        answer: wire.Tokenized = {
            "count": len(ids),
            "max_model_len": batcher.engine.facts.max_context,
            "tokens": ids,
            "token_strs": pieces,
        }
    return reply(answer, headers=ignored_header(parsed.ignored))


async def detokenize(service: Service, request: Request) -> Response:
    body = await service.read_body(request)
    with time_stage(request, Stage.PARSE):
        parsed = await service.take(request, body, wire.DetokenizeRequest)
        asked = parsed.request
        _, spec = service.chat_spec(asked.model, "tokenizing")
    ids = asked.tokens
    async with _leased(service, request, spec, asked) as batcher:
        tokens = batcher.engine.tokens

        def decode() -> str:
            if not all(tokens.pieces(ids)):
                raise BadRequest("Invalid 'tokens': the model has no such token.", param="tokens")
            return tokens.decode(ids)

        kind: Kind = "long prompts" if len(ids) > 32_000 else "short prompts"
        answer: wire.Detokenized = {"prompt": await _run(service, request, decode, kind)}
    return reply(answer, headers=ignored_header(parsed.ignored))


async def info(service: Service, request: Request) -> Response:
    """Answer with a model's special tokens and chat template.

    No model is loaded, since a link in any web page can send this request.
    """
    _, spec = service.chat_spec(request.query_params.get("model"), "tokenizing")
    caller = service.caller(request)
    caller.timings.model = spec.id
    spec = spec.base_spec or spec  # an adapter has the tokens of its base model
    model = service.models.model(spec)
    if isinstance(model, GenerationBatcher):
        tokenizer = model.engine.tokens.tokenizer
    else:
        async with while_connected(request.receive), until_deadline(caller):
            tokenizer = await service.pool.run(service.tokenizer, spec, kind="descriptions")
    body: wire.TokenizerInfo = {
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "pad_token": tokenizer.pad_token,
        "chat_template": tokenizer.chat_template,
    }
    return reply(body)


@asynccontextmanager
async def _leased(
    service: Service, request: Request, spec: ChatSpec, asked: WireRequest
) -> AsyncIterator[GenerationBatcher]:
    caller = service.caller(request)
    lease = service.lease(spec.base_spec or spec, caller, asked)
    async with while_connected(request.receive), lease as batcher:
        assert isinstance(batcher, GenerationBatcher)
        caller.timings.model, caller.timings.stage = spec.id, Stage.TOKENIZE
        yield batcher


async def _run(service: Service, request: Request, work: Callable[[], T], kind: Kind) -> T:
    with time_stage(request, Stage.TOKENIZE):
        return await service.pool.run(work, kind=kind)
