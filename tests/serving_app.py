"""A gateway over a real socket: scripted engines or real ones, stopped at the end."""

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import yaml
from hypercorn.asyncio import serve
from starlette.types import ASGIApp

from gateway import metrics
from gateway.app.gateway import Gateway
from gateway.app.loading import Engines
from gateway.registry import Catalog, load_catalog
from gateway.server import connections
from gateway.settings import Settings


def catalog(folder: Path, models: Mapping[str, Mapping[str, Any]]) -> Catalog:
    """Write a models.yaml and read it."""
    file = folder / "models.yaml"
    file.write_text(yaml.safe_dump({"version": 1, "models": dict(models)}), encoding="utf-8")
    return load_catalog(file, {})


def settings(**given: Any) -> Settings:
    """Give settings that no environment changes; no pass is run but those that are asked for."""
    return Settings(_env_file=None, **{"warm_up": False, "self_test": False, **given})  # type: ignore[call-arg]


@asynccontextmanager
async def served(
    catalog: Catalog, engines: Engines, *, wait_ready: bool = True, **given: Any
) -> AsyncIterator[httpx2.AsyncClient]:
    """Serve on a free port, wait for /ready, and give a client of it."""
    given_settings = settings(**given)
    async with served_app(Gateway(given_settings, catalog, engines).asgi, given_settings) as client:
        if wait_ready:
            await ready(client)
        yield client


@asynccontextmanager
async def served_app(app: ASGIApp, settings: Settings) -> AsyncIterator[httpx2.AsyncClient]:
    """Serve any app as the gateway is served, and give a client of it."""
    connections.install(settings.send_timeout_s)
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    config = connections.Config()
    config.bind = [f"fd://{listener.detach()}"]
    config.graceful_timeout = 0.2
    config.keep_alive_timeout = settings.keep_alive_timeout_s
    config.h11_max_incomplete_size = settings.read_header_bytes
    config.errorlog = None
    stop = asyncio.Event()
    server = asyncio.create_task(
        serve(app, config, shutdown_trigger=stop.wait)  # type: ignore[arg-type]
    )
    try:
        # No authorities are read for a server that speaks no TLS: it takes longer than a start.
        async with httpx2.AsyncClient(base_url=url, timeout=30, verify=False) as client:
            yield client
    finally:
        stop.set()
        await server


def level(name: str) -> float:
    """Return the present value of a name in /metrics, summed over its labels."""
    return sum(value for _, value in metrics.snapshot().values.get(name, ()))


async def ready(client: httpx2.AsyncClient) -> None:
    """Wait until the gateway says it is ready."""
    async with asyncio.timeout(60):
        while True:
            try:
                if (await client.get("/ready")).status_code == 200:
                    return
            except httpx2.TransportError:
                pass
            await asyncio.sleep(0.02)
