"""Answers in JSON: those that are neither an error nor OpenAI's own, and very long ones."""

import asyncio
from collections.abc import Callable, Mapping
from http import HTTPStatus

import orjson
from starlette.responses import Response

MANY = 5_000  # logprobs: some milliseconds' work


def reply(
    body: object, status: int = HTTPStatus.OK, *, headers: Mapping[str, str] | None = None
) -> Response:
    """Answer with JSON."""
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


async def written(write: Callable[[], bytes], logprobs: int) -> bytes:
    """Write an answer with so many logprobs: off the loop if they are very many."""
    return write() if logprobs <= MANY else await asyncio.to_thread(write)
