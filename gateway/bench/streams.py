"""Server-sent events: bytes → events → the answer they add up to. No I/O."""

from typing import Any

import orjson

from gateway.bench.requests import WrongAnswer

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
        self._content = ""
        self._reasoning = ""
        self._finish_reason: str | None = None
        self._usage: dict[str, Any] | None = None
        self._pieces = 0
        self._is_done = False

    def add(self, event: bytes) -> bool:
        """Add an event; return True if it has text. Raises WrongAnswer."""
        if event == DONE:
            self._is_done = True
            return False
        before = len(self._content) + len(self._reasoning)
        try:
            self._add_chunk(orjson.loads(event))
        except orjson.JSONDecodeError:
            raise WrongAnswer("event is not JSON") from None
        except (AttributeError, TypeError):
            raise WrongAnswer("event has another shape") from None
        has_text = len(self._content) + len(self._reasoning) > before
        self._pieces += has_text
        return has_text

    def _add_chunk(self, chunk: Any) -> None:
        if error := chunk.get("error"):
            raise WrongAnswer(f"error event {name_error(error)}")
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            self._content += delta.get("content") or ""
            self._reasoning += delta.get("reasoning_content") or delta.get("reasoning") or ""
            self._finish_reason = choice.get("finish_reason") or self._finish_reason

    def answer(self) -> dict[str, Any]:
        """Return the stream as an unstreamed answer; raises WrongAnswer if it was cut short.

        Without `usage`, which some servers don't stream, each piece counts as a token.
        """
        if not self._is_done:
            raise WrongAnswer("stream without [DONE]")
        message = {"content": self._content, "reasoning": self._reasoning}
        choice = {"message": message, "finish_reason": self._finish_reason}
        return {"choices": [choice], "usage": self._usage or {"completion_tokens": self._pieces}}


def name_error(error: Any) -> str:
    """Return the name of an OpenAI error object: its code, else its type."""
    if not isinstance(error, dict):
        return "of no shape"
    return str(error.get("code") or error.get("type") or "without a code")
