"""GET /health, /ready, /version, /metrics and /openapi.json, for supervisors and tools."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from http import HTTPStatus
from typing import NotRequired

import orjson
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from gateway import __version__
from gateway import metrics as instruments
from gateway.api.in_flight import context_of
from gateway.api.openapi import Endpoint, document
from gateway.api.requests import Exposure, Service, reply
from gateway.registry import Catalog


class Health(TypedDict):
    """Whether the gateway's engine makes progress."""

    status: str


class Ready(TypedDict):
    """Whether requests are accepted. Callers who may list models also get each model's state."""

    status: str
    models: NotRequired[Mapping[str, str]]


class Index(TypedDict):
    """The name of the server, and the paths of its model list, OpenAPI document and pages."""

    name: str
    models: str
    openapi: str
    dashboard: NotRequired[str]
    docs: NotRequired[str]


class Version(TypedDict):
    """The version of the gateway."""

    version: str


async def index(service: Service, request: Request) -> Response:
    """Answer agents that look for the server at its base URL; send browsers to the dashboard."""
    body: Index = {"name": "mlx-gateway", "models": "/v1/models", "openapi": "/openapi.json"}
    if not service.exposure.has_dashboard:
        return reply(body)
    body |= {"dashboard": "/dashboard", "docs": "/docs"}
    headers = {"vary": "Accept"}
    if request.url.path != "/" or not _wants_page(request.headers.getlist("accept")):
        return reply(body, headers=headers)
    # The address is relative, so that it is right behind a proxy that adds a prefix.
    return reply(body, HTTPStatus.TEMPORARY_REDIRECT, headers={"location": "dashboard", **headers})


def _wants_page(accepts: Sequence[str]) -> bool:
    """Return whether a page is preferred by name to JSON: `*/*` is what curl and SDKs send."""
    weights = {"text/html": 0.0, "application/json": 0.0}
    for item in ",".join(accepts).lower().split(","):
        kind, *parameters = (part.strip() for part in item.split(";"))
        quality = next((part[2:] for part in parameters if part.startswith("q=")), "1")
        with suppress(ValueError):
            weights[kind] = float(quality)
    return weights["text/html"] > weights["application/json"]


async def health(service: Service, request: Request) -> Response:
    status = service.health()
    body: Health = {"status": status}
    return reply(body, 200 if status == "ok" else 503)


async def ready(service: Service, request: Request) -> Response:
    status = service.readiness()
    body: Ready = {"status": status}
    if context_of(request).is_known:
        body["models"] = service.models.states()
    return reply(body, 200 if status == "ready" else 503)


async def version(service: Service, request: Request) -> Response:
    body: Version = {"version": __version__}
    return reply(body)


async def metrics(service: Service, request: Request) -> Response:
    return Response(instruments.text(), media_type=instruments.CONTENT_TYPE)


async def describe(service: Service, endpoints: Sequence[Endpoint]) -> Response:
    served = service.served.catalog, tuple(endpoints), service.exposure, service.rules.strict_fields
    # Only the first request builds the document, in a fifth of a second.
    body = await service.pool.run(_document_json, *served, kind="descriptions")
    return Response(body, media_type="application/json")


@lru_cache(maxsize=1)
def _document_json(
    catalog: Catalog, endpoints: Sequence[Endpoint], exposure: Exposure, strict: bool
) -> bytes:
    return orjson.dumps(document(catalog, endpoints, exposure, strict=strict))
