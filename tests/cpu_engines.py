"""MLX's engines on the CPU, which no environment changes."""

from typing import Any, TypeVar

from gateway.app.engines import MlxEngines
from gateway.engine.hub import Hub
from tests.serving_app import settings

E = TypeVar("E", bound=MlxEngines)
NO_HUB = Hub(endpoint="http://127.0.0.1:9")


def cpu_engines(hub: Hub = NO_HUB, **given: Any) -> MlxEngines:
    """Return engines that keep no prefix and read nothing ahead, but for what is given."""
    return engines_of(MlxEngines, hub, **given)


def engines_of(kind: type[E], hub: Hub = NO_HUB, **given: Any) -> E:
    """Return engines of a kind, as `cpu_engines` does."""
    return kind(
        settings(
            **{
                "device": "cpu",
                "hub_endpoint": hub.endpoint,
                "hub_cache": hub.cache,
                "hub_timeout_s": hub.timeout_s,
                "auto_pull": hub.may_download,
                "prefix_cache_bytes": 0,
                "speculate_rows": 0,
                **given,
            }
        )
    )
