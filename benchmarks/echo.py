"""The least that Starlette and Hypercorn can do: read a JSON body, answer JSON of our size.

`python -m benchmarks.echo PORT`. The gateway's work per small request is measured
against it.
"""

import asyncio
import base64
import sys

from hypercorn.asyncio import serve
from hypercorn.config import Config
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

DIMENSIONS = 32
VECTOR = base64.b64encode(bytes(4 * DIMENSIONS)).decode()


async def answer(request: Request) -> JSONResponse:
    """Answer as an embeddings endpoint would, without a vector."""
    body = await request.json()
    data = [{"object": "embedding", "index": 0, "embedding": VECTOR}]
    usage = {"prompt_tokens": 8, "total_tokens": 8}
    return JSONResponse({"object": "list", "data": data, "model": body["model"], "usage": usage})


async def health(_: Request) -> PlainTextResponse:
    """Say that it is there."""
    return PlainTextResponse("ok")


def main() -> None:
    """Serve on a port of loopback until a signal."""
    app = Starlette(
        routes=[Route("/v1/embeddings", answer, methods=["POST"]), Route("/health", health)]
    )
    config = Config()
    config.bind = [f"127.0.0.1:{sys.argv[1]}"]
    config.backlog = 2048
    config.accesslog = config.errorlog = None
    asyncio.run(serve(app, config))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
