"""What a right answer is. A judge counts its vectors or tokens, or says what is wrong with it."""

import base64
import binascii
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jsonschema  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt
import orjson

Judge: TypeAlias = Callable[[Any], int]


class WrongAnswer(Exception):
    """An answer that is not what was asked for; its text is the name it is counted by."""


def judged(judge: Judge, answer: Any) -> int:
    """Count an answer; one that lacks what the judge looks for is a WrongAnswer as well."""
    try:
        return judge(answer)
    except (AttributeError, KeyError, IndexError, TypeError):
        raise WrongAnswer("answer has another shape") from None


def vectors(count: int) -> Judge:
    """Judge an embeddings answer: that many vectors, all of one length, of finite numbers."""

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


def text(answer: Any) -> int:
    """Judge a chat answer: it is finished, and told how many tokens it has."""
    if answer["choices"][0]["finish_reason"] not in ("stop", "length", "tool_calls"):
        raise WrongAnswer("no finish_reason")
    return int(answer["usage"]["completion_tokens"])


def structured(schema: Mapping[str, Any]) -> Judge:
    """Judge an answer that must match a schema."""
    validator = jsonschema.Draft202012Validator(schema)

    def judge(answer: Any) -> int:
        tokens = text(answer)
        try:
            value = orjson.loads(answer["choices"][0]["message"]["content"])
        except orjson.JSONDecodeError:
            raise WrongAnswer("answer is not JSON") from None
        if not validator.is_valid(value):
            raise WrongAnswer("answer does not match the schema")
        return tokens

    return judge


def logprobs(top: int) -> Judge:
    """Judge an answer whose every token has its logprob and the `top` likeliest."""

    def judge(answer: Any) -> int:
        tokens = text(answer)
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
    """Tell whether it is the logarithm of a probability, rounding allowed for."""
    return isinstance(given, int | float) and math.isfinite(given) and given <= 1e-3
