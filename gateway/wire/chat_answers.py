"""Deltas → a chat completion, whole or in chunks. Names are those of OpenAI's SDK."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NotRequired, cast

import orjson
from typing_extensions import TypedDict

from gateway.jobs import CallDelta, Delta, TokenLogprob, Usage
from gateway.jobs import FinishReason as Finish

FinishReason = Literal["stop", "length", "tool_calls", "function_call"]


class PromptTokensDetails(TypedDict):
    """Of the prompt's tokens, those whose KV was cached."""

    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    """Of the answer's tokens, those of the model's reasoning."""

    reasoning_tokens: int


class CompletionUsage(TypedDict):
    """Tokens read and written, all choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TopLogprob(TypedDict):
    """A token that might have stood there."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    """A token of the answer and the likeliest of its place, likeliest first."""

    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(TypedDict):
    """The logprobs of every token of a text."""

    content: list[ChatTokenLogprob]
    refusal: None


class FunctionCall(TypedDict):
    """A function's name, and its arguments as JSON inside a string."""

    name: str
    arguments: str


class FunctionCallDelta(TypedDict):
    """A piece of a function's arguments; the first has its name."""

    name: NotRequired[str]
    arguments: str


class ChatToolCall(TypedDict):
    """A call of a function."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatToolCallDelta(TypedDict):
    """A piece of the call number `index`; id and type come once, first."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionCallDelta


class ChatMessage(TypedDict):
    """What the model wrote: text, reasoning, calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    function_call: NotRequired[FunctionCall]
    tool_calls: NotRequired[list[ChatToolCall]]


class ChoiceDelta(TypedDict, total=False):
    """What is new in a message."""

    role: Literal["assistant"]
    content: str
    reasoning_content: str
    function_call: FunctionCallDelta
    tool_calls: list[ChatToolCallDelta]


class ChatChoice(TypedDict):
    """One answer of several."""

    index: int
    message: ChatMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: FinishReason


class ChatChunkChoice(TypedDict):
    """What is new in one answer of several; the last piece has the reason for its end."""

    index: int
    delta: ChoiceDelta
    logprobs: ChoiceLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletion(TypedDict):
    """An answer to a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: CompletionUsage


class SchemaVerdict(TypedDict):
    """What of its schema no grammar held an answer to, and whether it fits; null if unknown."""

    unenforced: list[str]
    schema_valid: bool | None


class ChatCompletionChunk(TypedDict):
    """An event of a stream; the one with usage has no choices, and comes last, before `[DONE]`."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[CompletionUsage]
    timings: NotRequired[Mapping[str, float]]
    gateway: NotRequired[SchemaVerdict]


@dataclass(frozen=True, slots=True)
class ChatCompletionWriter:
    """Writes an answer, with what every piece of it repeats.

    Where a request `is_legacy`, calls are written under their older name, `function_call`.
    """

    id: str
    created: int
    model: str
    fingerprint: str
    is_legacy: bool = False

    def completion(self, choices: Sequence["ChatChoiceWriter"], usage: Usage) -> ChatCompletion:
        """Return the whole answer.

        Each choice is JSON already, made by itself: orjson lets no other thread run meanwhile.
        """
        written = [orjson.Fragment(orjson.dumps(choice.to_dict())) for choice in choices]
        return {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": cast(list[ChatChoice], written),
            "usage": usage_dict(usage),
        }

    def role(self, index: int) -> ChatCompletionChunk:
        """Return a choice's first chunk: the only one with a role."""
        return self._chunk([_piece(index, {"role": "assistant", "content": ""})])

    def chunks(
        self, delta: Delta, verdict: SchemaVerdict | None = None
    ) -> list[ChatCompletionChunk]:
        """Return the chunks of a delta: text, reasoning, a call, the end with its verdict."""
        logprobs = logprobs_dict(delta.logprobs) if delta.logprobs else None
        index = delta.index
        pieces = []
        if delta.reasoning:
            pieces.append(_piece(index, {"reasoning_content": delta.reasoning}))
        if delta.text or logprobs is not None:
            pieces.append(_piece(index, {"content": delta.text}, logprobs))
        if delta.call is not None:
            pieces += [_piece(index, each) for each in self._call(delta.call)]
        chunks = [self._chunk([piece]) for piece in pieces]
        if delta.finish_reason is not None:
            reason = _finish_reason(delta.finish_reason, is_legacy=self.is_legacy)
            end = self._chunk([_piece(index, {}, finish_reason=reason)])
            if verdict is not None:
                end["gateway"] = verdict
            chunks.append(end)
        return chunks

    def usage(self, usage: Usage, timings: Mapping[str, float]) -> ChatCompletionChunk:
        """Return the chunk that `include_usage` asks for: no choices, and the last."""
        chunk = self._chunk([])
        chunk["usage"] = usage_dict(usage)
        chunk["timings"] = timings
        return chunk

    def _call(self, call: CallDelta) -> list[ChoiceDelta]:
        """Return a call's opening, with id and name, and its arguments: two pieces."""
        pieces: list[ChatToolCallDelta] = []
        if call.name is not None:
            assert call.id is not None
            function: FunctionCallDelta = {"name": call.name, "arguments": ""}
            pieces.append(
                {"index": call.index, "id": call.id, "type": "function", "function": function}
            )
        if call.arguments:
            pieces.append({"index": call.index, "function": {"arguments": call.arguments}})
        if self.is_legacy:
            return [{"function_call": piece["function"]} for piece in pieces]
        return [{"tool_calls": [piece]} for piece in pieces]

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatCompletionChunk:
        return {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }


def _piece(
    index: int,
    delta: ChoiceDelta,
    logprobs: ChoiceLogprobs | None = None,
    finish_reason: FinishReason | None = None,
) -> ChatChunkChoice:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


class ChatChoiceWriter:
    """Gathers one choice of an answer."""

    def __init__(self, index: int, *, has_logprobs: bool, is_legacy: bool) -> None:
        self._index = index
        self._has_logprobs = has_logprobs
        self._is_legacy = is_legacy
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, ChatToolCall] = {}
        self._logprobs: list[TokenLogprob] = []
        self._finish_reason: Finish | None = None

    def add(self, delta: Delta) -> None:
        """Take the next delta."""
        self._text.append(delta.text)
        self._reasoning.append(delta.reasoning)
        self._logprobs += delta.logprobs
        self._finish_reason = delta.finish_reason
        if (new := delta.call) is not None:
            if new.index not in self._calls:
                assert new.id is not None
                function: FunctionCall = {"name": "", "arguments": ""}
                self._calls[new.index] = {"id": new.id, "type": "function", "function": function}
            function = self._calls[new.index]["function"]
            function["name"] += new.name or ""
            function["arguments"] += new.arguments

    def to_dict(self) -> ChatChoice:
        """Return the whole choice, which has ended."""
        assert self._finish_reason is not None
        return {
            "index": self._index,
            "message": self._message(),
            "logprobs": logprobs_dict(self._logprobs) if self._has_logprobs else None,
            "finish_reason": _finish_reason(self._finish_reason, is_legacy=self._is_legacy),
        }

    def _message(self) -> ChatMessage:
        text = "".join(self._text)
        message: ChatMessage = {"role": "assistant", "content": text, "refusal": None}
        if reasoning := "".join(self._reasoning):
            message["reasoning_content"] = reasoning
        if self._calls:
            message["content"] = text or None
            calls = list(self._calls.values())
            if self._is_legacy:
                message["function_call"] = calls[0]["function"]
            else:
                message["tool_calls"] = calls
        return message


def _finish_reason(reason: Finish, *, is_legacy: bool) -> FinishReason:
    return "function_call" if is_legacy and reason == "tool_calls" else reason


def logprobs_dict(logprobs: Sequence[TokenLogprob]) -> ChoiceLogprobs:
    """Return logprobs with both lists that OpenAI's have."""
    return {"content": [token_dict(each) for each in logprobs], "refusal": None}


def token_dict(logprob: TokenLogprob) -> ChatTokenLogprob:
    """Return one token's logprob and its place's likeliest, likeliest first."""
    tokens: list[TopLogprob] = [
        {"token": each.token, "logprob": each.logprob, "bytes": list(each.bytes)}
        for each in (logprob.chosen, *logprob.top)
    ]
    first, *top = tokens
    return {**first, "top_logprobs": top}


def usage_dict(usage: Usage) -> CompletionUsage:
    """Return usage with the details that clients look for."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }
