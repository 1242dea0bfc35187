"""`python -m tests.provoked.mortal`: serve, for real, on a device that one token kills."""

import asyncio
import os

from gateway import logs
from gateway.app.engines import MlxEngines
from gateway.app.gateway import Gateway
from gateway.cli.serve import run
from gateway.registry import load_catalog
from gateway.settings import load_settings, variables
from tests.simulated_device import IGNORED, SimulatedDevice


class Mortal(SimulatedDevice):
    """A device on which all work fails once it has computed with the token of `faults`."""

    def fail(self, *texts: str) -> None:
        self.is_dead = True


def main() -> None:
    """Serve models.yaml of this folder."""
    settings = load_settings()
    logs.configure(settings.log_level, settings.log_format)
    device = Mortal()
    device.faults = {int(os.environ["MORTAL_TOKEN"]): IGNORED}
    catalog = load_catalog(settings.models, variables())
    with device.installed():
        asyncio.run(run(Gateway(settings, catalog, MlxEngines(settings)), settings))


if __name__ == "__main__":
    main()
