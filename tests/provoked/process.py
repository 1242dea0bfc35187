"""`python -m tests.provoked.process`: serve the answers of scripted engines, for real."""

import asyncio
import os

from gateway import logs
from gateway.app.gateway import Gateway
from gateway.cli import serve
from gateway.registry import load_catalog
from gateway.settings import load_settings, variables
from tests.provoked.engines import HeldEmbedder, HeldEngines, HeldWriter

STEP_S = 0.005


def main() -> None:
    """Serve models.yaml of this folder; SHUTDOWN_S are the seconds to close it, after the drain."""
    settings = load_settings()
    logs.configure(settings.log_level, settings.log_format)
    engines = HeldEngines(HeldEmbedder(pass_s=STEP_S), HeldWriter(step_s=STEP_S))
    catalog = load_catalog(settings.models, variables())
    serve.SHUTDOWN_S = int(os.environ.get("SHUTDOWN_S", serve.SHUTDOWN_S))
    asyncio.run(serve.run(Gateway(settings, catalog, engines), settings))


if __name__ == "__main__":
    main()
