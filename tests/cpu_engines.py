"""MLX's engines on the CPU, which no environment changes."""

from typing import Any

from gateway.app.engines import MlxEngines
from gateway.engine.hub import Hub
from gateway.settings import Settings
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


def cpu_engines(hub: Hub = NO_HUB, **given: Any) -> MlxEngines:
    return MlxEngines(cpu_settings(hub, **given))
