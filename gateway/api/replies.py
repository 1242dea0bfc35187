"""An answer in JSON that is neither an error nor OpenAI's own."""

from http import HTTPStatus

import orjson
from starlette.responses import Response


def reply(value: object, status: int = HTTPStatus.OK) -> Response:
    """Write a value as JSON."""
    return Response(orjson.dumps(value), status, media_type="application/json")
