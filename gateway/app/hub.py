"""Makes the hub client from the settings, without mlx: some commands only list models."""

from gateway.engine.hub import Hub
from gateway.settings import Settings


def hub_of(settings: Settings, *, may_download: bool) -> Hub:
    """Return a client of the settings' hub. `pull` may download even without GATEWAY_AUTO_PULL."""
    return Hub(
        endpoint=settings.hub_endpoint,
        cache=settings.hub_cache,
        timeout_s=settings.hub_timeout_s,
        may_download=may_download,
    )
