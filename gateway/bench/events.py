"""Server-sent events: bytes → events → the answer they add up to. No I/O."""

from collections.abc import Sequence
from typing import Any

import orjson

from gateway.bench.judging import WrongAnswer

DONE = b"[DONE]"


class EventReader:
    """Splits received bytes into events, wherever the network has split them."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> list[bytes]:
        """Return the data of each event that is now whole, without comments."""
        # joined first: a \r\n may be cut in two as well
        *whole, self._rest = (self._rest + received).replace(b"\r\n", b"\n").split(b"\n\n")
        return [event.removeprefix(b"data:").strip() for event in whole if event[:5] == b"data:"]


class Transcript:
    """A streamed chat answer, event by event."""

    def __init__(self) -> None:
        self._said: list[str] = []
        self._reasoned: list[str] = []
        self._tool_calls: list[Any] = []
        self._likelihoods: list[Any] = []
        self._finish_reason: str | None = None
        self._usage: dict[str, Any] | None = None
        self._pieces = 0
        self._is_done = False

    def add(self, event: bytes) -> bool:
        """Add an event; return True if it has text or a tool call. Raises WrongAnswer."""
        if event == DONE:
            self._is_done = True
            return False
        try:
            chunk = orjson.loads(event)
        except orjson.JSONDecodeError:
            raise WrongAnswer("event is not JSON") from None
        if not isinstance(chunk, dict):
            raise WrongAnswer("event is no object")
        if error := chunk.get("error"):
            raise WrongAnswer(f"error event {name_error(error)}")
        self._usage = chunk.get("usage") or self._usage
        try:
            outputs = [self._add_choice(choice) for choice in chunk.get("choices") or ()]
        except (AttributeError, TypeError):
            raise WrongAnswer("event has another shape") from None
        self._pieces += any(outputs)
        return any(outputs)

    def _add_choice(self, choice: Any) -> bool:
        delta = choice.get("delta") or {}
        text = delta.get("content") or ""
        reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
        tool_calls = delta.get("tool_calls") or ()
        if not (isinstance(text, str) and isinstance(reasoning, str)):
            raise TypeError
        self._said.append(text)
        self._reasoned.append(reasoning)
        self._tool_calls += tool_calls
        self._likelihoods += (choice.get("logprobs") or {}).get("content") or ()
        self._finish_reason = choice.get("finish_reason") or self._finish_reason
        return bool(text or reasoning or tool_calls)

    def answer(self) -> dict[str, Any]:
        """Return the stream as an unstreamed answer; raises WrongAnswer if it was cut short.

        Tool calls stay in the fragments that arrived. Without `usage`, which some servers don't
        stream, each piece counts as a token.
        """
        if not self._is_done:
            raise WrongAnswer("stream without [DONE]")
        choice = {
            "message": {
                "content": "".join(self._said),
                "reasoning": "".join(self._reasoned),
                "tool_calls": self._tool_calls,
            },
            "finish_reason": self._finish_reason,
            "logprobs": {"content": self._likelihoods},
        }
        return {"choices": [choice], "usage": self._usage or {"completion_tokens": self._pieces}}


def name_error(error: Any) -> str:
    """Return the name of an OpenAI error object: its code, else its type."""
    if not isinstance(error, dict):
        return "of no shape"
    names: Sequence[Any] = (error.get("code"), error.get("type"))
    return next((str(name) for name in names if name), "without a code")
