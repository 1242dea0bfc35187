"""The hub that the settings name; without mlx, for the commands that only look at models."""

from typing import TYPE_CHECKING

from gateway.settings import Settings

if TYPE_CHECKING:
    from gateway.engine.hub import Hub


def hub_of(settings: Settings, *, may_download: bool) -> "Hub":
    """Give the hub. Whether anything may be fetched from it is not for GATEWAY_AUTO_PULL alone."""
    from gateway.engine.hub import Hub

    return Hub(
        endpoint=settings.hub_endpoint,
        cache=settings.hub_cache,
        timeout_s=settings.hub_timeout_s,
        may_download=may_download,
    )
