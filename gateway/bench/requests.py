"""Builds requests, and reads and counts their answers, streamed or not.

The same seed makes the same texts, which all differ, so that no server can cache them.
"""

import math
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from random import Random
from typing import Any, Final

import orjson

_PAGE: Final = (
    "the a one every old new small large quiet bright river mountain garden station market "
    "library engine letter window morning evening winter summer child teacher farmer doctor "
    "reads writes finds carries opens closes follows answers remembers builds paints repairs "
    "slowly quickly often never always under over beside behind near between without because"
)
WORDS: Final = _PAGE.split()
DONE: Final = b"[DONE]"


class Kind(StrEnum):
    """A kind of work."""

    EMBEDDINGS = "embeddings"
    RERANK = "rerank"
    CHAT = "chat"


class WrongAnswer(Exception):
    """Raised for an answer that does not fit its request. Errors are counted by message."""


class Texts:
    """Numbered texts, whose lengths in words cycle through `lengths`."""

    def __init__(self, seed: int, lengths: Sequence[int]) -> None:
        self._seed = seed
        self._lengths = lengths

    def __getitem__(self, number: int) -> str:
        # The number comes first, so that no two texts share a prefix that a server may cache.
        random = Random(self._seed << 40 | number)
        length = self._lengths[number % len(self._lengths)]
        return " ".join((str(number), *random.choices(WORDS, k=length - 1)))

    def part(self, number: int, length: int) -> list[str]:
        """Return the texts of request `number`, if each request has `length` texts."""
        return [self[number * length + i] for i in range(length)]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `count` returns an answer's vectors, pairs or tokens, or raises WrongAnswer."""

    path: str
    body: bytes
    count: Callable[[Any], int]
    is_streamed: bool = False


class Workload:
    """An endless sequence of numbered requests, which all clients share."""

    def __init__(self, make: Callable[[int], Ask]) -> None:
        self._make = make
        self._numbers = count()

    def next(self) -> Ask:
        return self._make(next(self._numbers))


def embeddings(model: str, inputs: Sequence[str]) -> Ask:
    """Request vectors, in base64 as OpenAI's SDKs do."""
    body = {"model": model, "input": list(inputs), "encoding_format": "base64"}

    def count_vectors(answer: Any) -> int:
        sizes = {len(item["embedding"]) for item in answer["data"]}
        if len(answer["data"]) != len(inputs) or len(sizes) != 1 or not all(sizes):
            raise WrongAnswer("wrong number of vectors")
        return len(inputs)

    return Ask("/embeddings", orjson.dumps(body), count_vectors)


def rerank(model: str, query: str, documents: Sequence[str]) -> Ask:
    """Request a score for each document, in Cohere's format."""
    body = {"model": model, "query": query, "documents": list(documents)}

    def count_pairs(answer: Any) -> int:
        scores = {item["index"]: item["relevance_score"] for item in answer["results"]}
        if sorted(scores) != list(range(len(documents))):
            raise WrongAnswer("not one score for each document")
        if not all(math.isfinite(score) for score in scores.values()):
            raise WrongAnswer("score is not finite")
        return len(documents)

    return Ask("/rerank", orjson.dumps(body), count_pairs)


def chat(model: str, prompt: str, *, max_tokens: int, images: Sequence[bytes] = ()) -> Ask:
    """Request a streamed chat answer with greedy sampling, about PNG files if there are some."""
    urls = [f"data:image/png;base64,{b64encode(image).decode()}" for image in images]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [*parts, {"type": "text", "text": prompt}] if parts else prompt
    body = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return Ask("/chat/completions", orjson.dumps(body), count_tokens, is_streamed=True)


def count_tokens(answer: Any) -> int:
    """Return the tokens of a chat answer. Raises WrongAnswer if it is cut or empty."""
    choice, tokens = answer["choices"][0], int(answer["usage"]["completion_tokens"])
    if not choice["finish_reason"]:
        raise WrongAnswer("no finish_reason")
    message = choice["message"]
    names = ("content", "reasoning", "reasoning_content", "tool_calls")
    if tokens and not any(message.get(name) for name in names):
        raise WrongAnswer("answer is empty")
    return tokens


class EventReader:
    """Splits received bytes into events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> list[bytes]:
        """Return the data of each complete event, without comments."""
        # A \r\n may be cut in two, so join the bytes first.
        *whole, self._rest = (self._rest + received).replace(b"\r\n", b"\n").split(b"\n\n")
        return [event.removeprefix(b"data:").strip() for event in whole if event[:5] == b"data:"]


class Transcript:
    """A streamed chat answer, built event by event."""

    def __init__(self) -> None:
        self._content = ""
        self._reasoning = ""
        self._finish_reason: str | None = None
        self._usage: dict[str, Any] | None = None
        self._pieces = 0
        self._is_done = False

    def add(self, event: bytes) -> bool:
        """Add an event, and return True if it has text. Raises WrongAnswer if it is malformed."""
        if event == DONE:
            self._is_done = True
            return False
        before = len(self._content) + len(self._reasoning)
        try:
            self._add_chunk(orjson.loads(event))
        except orjson.JSONDecodeError:
            raise WrongAnswer("event is not JSON") from None
        except (AttributeError, TypeError):
            raise WrongAnswer("event is not a chat completion chunk") from None
        has_text = len(self._content) + len(self._reasoning) > before
        self._pieces += has_text
        return has_text

    def _add_chunk(self, chunk: Any) -> None:
        error = chunk.get("error")
        if error:  # a stream that has begun reports its failure this way
            raise WrongAnswer(f"error event {name_error(error)}")
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            self._content += delta.get("content") or ""
            self._reasoning += delta.get("reasoning_content") or delta.get("reasoning") or ""
            self._finish_reason = choice.get("finish_reason") or self._finish_reason

    def answer(self) -> dict[str, Any]:
        """Return the stream as an unstreamed answer. Raises WrongAnswer if it was cut short."""
        if not self._is_done:
            raise WrongAnswer("stream without [DONE]")
        message = {"content": self._content, "reasoning": self._reasoning}
        choice = {"message": message, "finish_reason": self._finish_reason}
        # Some servers don't stream `usage`, so each piece counts as a token.
        usage = self._usage or {"completion_tokens": self._pieces}
        return {"choices": [choice], "usage": usage}


def name_error(error: Any) -> str:
    if not isinstance(error, dict):
        return "without an error object"
    return str(error.get("code") or error.get("type") or "without a code")
