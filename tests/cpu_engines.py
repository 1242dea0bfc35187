"""MLX's engines on the CPU, which no environment changes."""

import atexit
from functools import cache
from typing import Any

from gateway.app.engines import RENDER_S, MlxEngines
from gateway.engine.hub import Hub
from gateway.serving.sandbox import Sandbox
from gateway.settings import Settings
from tests.sandboxes import sandbox
from tests.serving_app import settings

NO_HUB = Hub(endpoint="http://127.0.0.1:9")


def cpu_settings(hub: Hub = NO_HUB, **given: Any) -> Settings:
    """Return settings by which no prefix is kept and nothing is read ahead, unless given."""
    of_hub = {
        "hub_endpoint": hub.endpoint,
        "hub_cache": hub.cache,
        "hub_timeout_s": hub.timeout_s,
        "auto_pull": hub.may_download,
    }
    defaults = {"device": "cpu", "prefix_cache_bytes": 0, "speculate_rows": 0}
    return settings(**{**defaults, **of_hub, **given})


@cache
def _shared(kind: str, timeout_s: float, quick_s: float = 1.0) -> Sandbox:
    """Give a sandbox whose processes serve all gateways of this process, until its end."""
    box = sandbox(kind, timeout_s, quick_s=quick_s)
    atexit.register(box.__exit__)
    return box


class CpuEngines(MlxEngines):
    """These share their sandboxes: four processes for each gateway took most of a test's time."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._grammars = _shared("grammar", settings.structured_compile_timeout_s)
        self._templates = _shared("template", RENDER_S, RENDER_S / 10)

    def close_sandboxes(self) -> None:
        """Leave them to the next gateway."""


def cpu_engines(hub: Hub = NO_HUB, **given: Any) -> MlxEngines:
    return CpuEngines(cpu_settings(hub, **given))
