"""`python -m tests.provoked.process`: serve, for real, what scripted engines answer."""

import asyncio

from gateway import logs
from gateway.app.gateway import Gateway
from gateway.cli.serve import run
from gateway.registry import load_catalog
from gateway.settings import load_settings, variables
from tests.provoked.engines import HeldEmbedder, HeldEngines, HeldWriter

STEP_S = 0.005


def main() -> None:
    """Serve models.yaml of this folder."""
    settings = load_settings()
    logs.configure(settings.log_level, settings.log_format)
    engines = HeldEngines(HeldEmbedder(pass_s=STEP_S), HeldWriter(step_s=STEP_S))
    catalog = load_catalog(settings.models, variables())
    asyncio.run(run(Gateway(settings, catalog, engines), settings))


if __name__ == "__main__":
    main()
