"""Answers in JSON: those that are neither an error nor OpenAI's own, and very long ones."""

import asyncio
from collections.abc import Callable
from http import HTTPStatus

import orjson
from starlette.responses import Response

MANY = 5_000  # logprobs: some milliseconds' work


def reply(value: object, status: int = HTTPStatus.OK) -> Response:
    """Write a value as JSON."""
    return Response(orjson.dumps(value), status, media_type="application/json")


async def written(write: Callable[[], bytes], logprobs: int) -> bytes:
    """Write an answer with so many logprobs: off the loop if they are very many."""
    return write() if logprobs <= MANY else await asyncio.to_thread(write)
