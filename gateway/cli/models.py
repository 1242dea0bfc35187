"""`mlx-gateway models`: what models.yaml offers, and what of it is on this machine."""

from typing import TYPE_CHECKING

from gateway.app.hub import hub_of
from gateway.cli._options import ModelsFile
from gateway.cli._table import show
from gateway.errors import GatewayError
from gateway.logs import human_bytes
from gateway.registry import HubSource, ModelSpec, load_catalog
from gateway.settings import load_settings, variables

if TYPE_CHECKING:
    from gateway.engine.hub import Hub


def models(models: ModelsFile = None) -> None:
    """List the models: id, kind, aliases, source, whether they are on disk, and their size."""
    settings = load_settings({"models": models})
    catalog = load_catalog(settings.models, variables())
    hub = hub_of(settings, may_download=False)
    rows = [
        (
            spec.id,
            spec.kind,
            ", ".join(alias.name for alias in spec.aliases),
            str(spec.source),
            *_on_disk(spec, hub),
        )
        for spec in catalog.specs
    ]
    show(("Id", "Kind", "Aliases", "Source", "On disk", "Size"), rows)


def _on_disk(spec: ModelSpec, hub: "Hub") -> tuple[str, str]:
    """Return whether a model is on disk, wholly or in part, and its size there."""
    from gateway.engine.hub import fetched_bytes, has_weights, on_disk, stored_bytes

    try:
        folder = on_disk(spec, hub)
    except GatewayError:
        folder = None
    if folder is not None and has_weights(folder):
        return "yes", human_bytes(stored_bytes(folder))
    fetched = fetched_bytes(spec, hub) if isinstance(spec.source, HubSource) else 0
    return ("in part", human_bytes(fetched)) if fetched else ("no", "")
