"""What a right answer is. A judge counts its vectors or tokens, or raises WrongAnswer."""

import base64
import binascii
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import jsonschema  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt
import orjson

Judge: TypeAlias = Callable[[Any], int]
MARKS = 32  # tokens without text: the end of a turn, what begins and ends reasoning or a tool call


class WrongAnswer(Exception):
    """An answer that is not what was asked for; its text is the name it is counted under."""


def judge_answer(judge: Judge, answer: Any) -> int:
    """Return an answer's count; raise WrongAnswer also where it lacks a key the judge reads."""
    try:
        return judge(answer)
    except (AttributeError, KeyError, IndexError, TypeError):
        raise WrongAnswer("answer has another shape") from None


def expect_vectors(count: int) -> Judge:
    """Return the judge of an embeddings answer: `count` finite vectors of one length."""

    def judge(answer: Any) -> int:
        rows = [_vector(item["embedding"]) for item in answer["data"]]
        if len(rows) != count:
            raise WrongAnswer("wrong number of vectors")
        if len({len(row) for row in rows}) != 1 or not len(rows[0]):
            raise WrongAnswer("vectors of different lengths")
        if not all(np.isfinite(row).all() for row in rows):
            raise WrongAnswer("vector is not finite")
        return count

    return judge


def _vector(given: Any) -> npt.NDArray[np.float32]:
    try:
        if isinstance(given, str):
            return np.frombuffer(base64.b64decode(given, validate=True), dtype="<f4")
        return np.asarray(given, dtype=np.float32).reshape(-1)
    except (binascii.Error, TypeError, ValueError):
        raise WrongAnswer("vector is no numbers") from None


def expect_scores(count: int) -> Judge:
    """Return the judge of a rerank answer: each of `count` documents once, the best first."""

    def judge(answer: Any) -> int:
        results = answer["results"]
        if sorted(each["index"] for each in results) != list(range(count)):
            raise WrongAnswer("wrong documents")
        scores = [each["relevance_score"] for each in results]
        if not all(isinstance(each, int | float) and math.isfinite(each) for each in scores):
            raise WrongAnswer("score is not finite")
        if scores != sorted(scores, reverse=True):
            raise WrongAnswer("documents are not sorted")
        return count

    return judge


def judge_text(answer: Any) -> int:
    """Judge a chat answer: it is finished, and has text for the tokens that it counts.

    A token may be many letters, and a letter several tokens (one per byte), but no token is less
    than a byte, except those that only mark where something begins and ends.
    """
    tokens = _count_tokens(answer)
    size = sum(_sizes(answer["choices"][0]["message"]))
    if tokens > 0 and not size:
        raise WrongAnswer("answer is empty")
    details = answer["usage"].get("completion_tokens_details") or {}
    if tokens - (details.get("reasoning_tokens") or 0) > size + MARKS:
        raise WrongAnswer("more tokens than text")
    return tokens


def _count_tokens(answer: Any) -> int:
    """Return the number of tokens; raise WrongAnswer for an answer without a finish_reason."""
    if answer["choices"][0]["finish_reason"] not in ("stop", "length", "tool_calls"):
        raise WrongAnswer("no finish_reason")
    return int(answer["usage"]["completion_tokens"])


def _sizes(message: Any) -> Iterator[int]:
    """Yield the sizes in bytes of a message's text, reasoning and tool calls."""
    for name in ("content", "reasoning_content", "reasoning"):
        yield len((message.get(name) or "").encode())
    yield from (len(orjson.dumps(call)) for call in message.get("tool_calls") or ())


def expect_schema(schema: Mapping[str, Any]) -> Judge:
    """Return the judge of a chat answer that must match a schema."""
    validator = jsonschema.Draft202012Validator(schema)

    def judge(answer: Any) -> int:
        tokens = judge_text(answer)
        try:
            value = orjson.loads(answer["choices"][0]["message"]["content"])
        except orjson.JSONDecodeError:
            raise WrongAnswer("answer is not JSON") from None
        if not validator.is_valid(value):
            raise WrongAnswer("answer does not match the schema")
        return tokens

    return judge


def expect_logprobs(top: int) -> Judge:
    """Return the judge of an answer whose every token has its logprob and the `top` likeliest."""

    def judge(answer: Any) -> int:
        tokens = _count_tokens(answer)
        content = answer["choices"][0]["logprobs"]["content"]
        if not content:
            raise WrongAnswer("no logprobs")
        for token in content:
            likeliest = token["top_logprobs"]
            if len(likeliest) != top:
                raise WrongAnswer("wrong number of top_logprobs")
            if not all(_is_logprob(each["logprob"]) for each in (token, *likeliest)):
                raise WrongAnswer("logprob is no logprob")
        return tokens

    return judge


def _is_logprob(given: Any) -> bool:
    """Return True for the logarithm of a probability, with room for rounding."""
    return isinstance(given, int | float) and math.isfinite(given) and given <= 1e-3
