"""POST /v1/chat/completions: request → GenerateJob; deltas → a completion or its chunks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import orjson
from pydantic import Field, field_validator

from gateway.errors import BadRequest
from gateway.jobs import Caller, Delta, GenerateJob, Sampling, Tier, Usage
from gateway.wire.messages import Message, to_template
from gateway.wire.reading import Fields, Part, Request

_LATER = "It is not served yet."
FIELDS = Fields(
    harmless=frozenset(
        {
            "metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
            "safety_identifier", "store", "user", "verbosity", "prediction",
            "parallel_tool_calls",
        }
    ),
    refused={
        "response_format": _LATER,
        "tools": _LATER,
        "tool_choice": _LATER,
        "functions": _LATER,
        "function_call": _LATER,
        "logprobs": _LATER,
        "top_logprobs": _LATER,
        "structured_outputs": _LATER,
        "guided_json": _LATER,
        "guided_regex": _LATER,
        "guided_choice": _LATER,
        "guided_grammar": _LATER,
        "reasoning_effort": _LATER,
        "audio": "This gateway writes text.",
        "modalities": "This gateway writes text.",
        "web_search_options": "This gateway has no web search.",
        "moderation": "This gateway does not moderate.",
    },
    neutral={
        "response_format": ({"type": "text"},),
        "tools": ([],),
        "functions": ([],),
        "tool_choice": ("none", "auto"),
        "function_call": ("none", "auto"),
        "logprobs": (False,),
        "top_logprobs": (0,),
        "modalities": (["text"], []),
    },
)  # fmt: skip


class StreamOptions(Part):
    """What the stream says beside its text."""

    include_usage: bool = False


Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]


class ChatRequest(Request):
    """What OpenAI's endpoint takes, with `top_k`, `min_p` and template arguments besides."""

    model: Annotated[str, Field(min_length=1)]
    messages: Annotated[list[Message], Field(min_length=1)]
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] = 1
    stop: Any = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] = 0.0
    logit_bias: Annotated[dict[str, Bias], Field(default_factory=dict)]
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    service_tier: str | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(default_factory=dict)]

    @field_validator("stop")
    @classmethod
    def _up_to_four(cls, given: object) -> tuple[str, ...]:
        stops = [given] if isinstance(given, str) else given
        if not isinstance(stops, list) or not 1 <= len(stops) <= 4:
            raise ValueError("it should be a string or an array of 1 to 4 strings")
        if not all(isinstance(stop, str) and stop for stop in stops):
            raise ValueError("a stop sequence should be a string that is not empty")
        return tuple(stops)

    @field_validator("logit_bias")
    @classmethod
    def _token_ids(cls, given: dict[str, float]) -> dict[str, float]:
        if not all(token.isascii() and token.isdigit() for token in given):
            raise ValueError("its keys should be token ids")
        return given


def to_job(
    request: ChatRequest,
    caller: Caller,
    defaults: Sampling,
    *,
    max_tokens: int | None,
    template_args: Mapping[str, Any],
    max_chars: int,
) -> GenerateJob:
    """Translate; what the request leaves out comes from the model's defaults."""
    messages = to_template(request.messages)
    if sum(len(message["content"]) for message in messages) > max_chars:
        raise BadRequest(f"The messages are longer than {max_chars} characters.", param="messages")
    return GenerateJob(
        caller=caller,
        messages=messages,
        sampling=Sampling(
            temperature=_or(request.temperature, defaults.temperature),
            top_p=_or(request.top_p, defaults.top_p),
            top_k=max(0, _or(request.top_k, defaults.top_k)),
            min_p=_or(request.min_p, defaults.min_p),
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            logit_bias={int(token): bias for token, bias in request.logit_bias.items()},
            seed=request.seed,
        ),
        max_tokens=request.max_completion_tokens or request.max_tokens or max_tokens,
        stop=request.stop or (),
        n=request.n,
        template_args={**template_args, **request.chat_template_kwargs},
    )


def _or(given: Any, default: Any) -> Any:
    return default if given is None else given


def tier(request: ChatRequest) -> Tier:
    """Read `service_tier`; OpenAI's other names for the default are the default."""
    names = [tier.value for tier in Tier]
    return Tier(request.service_tier) if request.service_tier in names else Tier.DEFAULT


@dataclass(frozen=True, slots=True)
class Heading:
    """What every piece of one answer repeats."""

    id: str
    created: int
    model: str
    fingerprint: str

    def _start(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def completion(self, choices: list["Choice"], usage: Usage) -> bytes:
        """Write the whole answer."""
        return orjson.dumps(
            {
                **self._start("chat.completion"),
                "choices": [choice.whole() for choice in choices],
                "usage": usage_json(usage),
            }
        )

    def role(self, index: int) -> bytes:
        """Write a choice's first chunk: the only one with a role."""
        return self._chunk(index, {"role": "assistant", "content": ""}, None)

    def text(self, delta: Delta) -> bytes:
        """Write a choice's new text."""
        return self._chunk(delta.index, {"content": delta.text}, None)

    def finish(self, delta: Delta) -> bytes:
        """Write a choice's last chunk, which has no text."""
        return self._chunk(delta.index, {}, delta.finish_reason)

    def usage(self, usage: Usage) -> bytes:
        """Write the chunk that `include_usage` asks for: no choices, and the last."""
        return orjson.dumps(
            {
                **self._start("chat.completion.chunk"),
                "choices": [],
                "usage": usage_json(usage),
            }
        )

    def _chunk(self, index: int, delta: dict[str, str], finish: str | None) -> bytes:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": finish,
        }
        return orjson.dumps({**self._start("chat.completion.chunk"), "choices": [choice]})


class Choice:
    """One answer, gathered."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._text: list[str] = []
        self._finish: str | None = None

    def add(self, delta: Delta) -> None:
        """Take the next delta."""
        self._text.append(delta.text)
        self._finish = delta.finish_reason

    def whole(self) -> dict[str, Any]:
        """Give the choice with all its text."""
        return {
            "index": self._index,
            "message": {
                "role": "assistant",
                "content": "".join(self._text),
                "refusal": None,
            },
            "logprobs": None,
            "finish_reason": self._finish,
        }


def usage_json(usage: Usage) -> dict[str, Any]:
    """Write usage with the details that clients look for."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
