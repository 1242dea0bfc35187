"""Deltas → a chat completion, whole or in chunks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.jobs import CallDelta, Delta, TokenLogprob, Usage


@dataclass(frozen=True, slots=True)
class Heading:
    """What every piece of one answer repeats. `is_legacy` tells calls as `function_call`."""

    id: str
    created: int
    model: str
    fingerprint: str
    is_legacy: bool = False

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
                # Each by itself: nobody else has a turn while one is being written.
                "choices": [orjson.Fragment(orjson.dumps(choice.whole())) for choice in choices],
                "usage": usage_json(usage),
            }
        )

    def role(self, index: int) -> bytes:
        """Write a choice's first chunk: the only one with a role."""
        return self._chunk(index, {"role": "assistant", "content": ""})

    def chunks(self, delta: Delta, verdict: Mapping[str, Any] | None = None) -> list[bytes]:
        """Write what a delta tells: text, reasoning, a call, the end, with the verdict on it."""
        logprobs = logprobs_json(delta.logprobs) if delta.logprobs else None
        chunks = []
        if delta.reasoning:
            chunks.append(self._chunk(delta.index, {"reasoning_content": delta.reasoning}))
        if delta.text or logprobs is not None:
            chunks.append(self._chunk(delta.index, {"content": delta.text}, logprobs))
        if delta.call is not None:
            chunks += [self._chunk(delta.index, piece) for piece in self._pieces(delta.call)]
        if delta.finish_reason is not None:
            reason = self._reason(delta.finish_reason)
            chunks.append(self._chunk(delta.index, {}, finish=reason, verdict=verdict))
        return chunks

    def usage(self, usage: Usage, timings: Mapping[str, float]) -> bytes:
        """Write the chunk that `include_usage` asks for: no choices, and the last."""
        return orjson.dumps(
            {
                **self._start("chat.completion.chunk"),
                "choices": [],
                "usage": usage_json(usage),
                "timings": timings,
            }
        )

    def _pieces(self, call: CallDelta) -> list[dict[str, Any]]:
        """Give a call's opening, with id and name, and its arguments, apart."""
        function: dict[str, Any]
        pieces: list[dict[str, Any]] = []
        if call.name is not None:
            function = {"name": call.name, "arguments": ""}
            opening = {"index": call.index, "id": call.id, "type": "function", "function": function}
            pieces.append(
                {"function_call": function} if self.is_legacy else {"tool_calls": [opening]}
            )
        if call.arguments:
            function = {"arguments": call.arguments}
            more = {"index": call.index, "function": function}
            pieces.append({"function_call": function} if self.is_legacy else {"tool_calls": [more]})
        return pieces

    def _reason(self, reason: str) -> str:
        return "function_call" if self.is_legacy and reason == "tool_calls" else reason

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        *,
        finish: str | None = None,
        verdict: Mapping[str, Any] | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        chunk = {**self._start("chat.completion.chunk"), "choices": [choice]}
        return orjson.dumps(chunk if verdict is None else {**chunk, "gateway": verdict})


class Choice:
    """One answer, gathered."""

    def __init__(self, index: int, *, has_logprobs: bool, is_legacy: bool) -> None:
        self._index = index
        self._has_logprobs = has_logprobs
        self._is_legacy = is_legacy
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}
        self._logprobs: list[TokenLogprob] = []
        self._finish: str | None = None

    def add(self, delta: Delta) -> None:
        """Take the next delta."""
        self._text.append(delta.text)
        self._reasoning.append(delta.reasoning)
        self._logprobs += delta.logprobs
        self._finish = delta.finish_reason
        if (new := delta.call) is not None:
            call = self._calls.setdefault(
                new.index,
                {"id": new.id, "type": "function", "function": {"name": "", "arguments": ""}},
            )
            call["function"]["name"] += new.name or ""
            call["function"]["arguments"] += new.arguments

    def whole(self) -> dict[str, Any]:
        """Give the choice with all that was told."""
        return {
            "index": self._index,
            "message": self._message(),
            "logprobs": logprobs_json(self._logprobs) if self._has_logprobs else None,
            "finish_reason": self._reason(),
        }

    def _reason(self) -> str | None:
        is_call = self._finish == "tool_calls"
        return "function_call" if self._is_legacy and is_call else self._finish

    def _message(self) -> dict[str, Any]:
        text = "".join(self._text)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
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


def logprobs_json(logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Write logprobs with both lists that OpenAI's have."""
    return {"content": [token_json(each) for each in logprobs], "refusal": None}


def token_json(logprob: TokenLogprob) -> dict[str, Any]:
    """Write one token's logprob and its place's likeliest, likeliest first."""
    first, *top = [
        {"token": each.token, "logprob": each.logprob, "bytes": list(each.bytes)}
        for each in (logprob.chosen, *logprob.top)
    ]
    return {**first, "top_logprobs": top}


def usage_json(usage: Usage) -> dict[str, Any]:
    """Write usage with the details that clients look for."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }
