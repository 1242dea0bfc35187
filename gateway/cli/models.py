"""`mlx-gateway models`: what models.yaml offers, and whether its files are on this machine."""

import json
from pathlib import Path
from typing import Annotated

import typer

from gateway.cli._table import show
from gateway.registry import (
    HubSource,
    PackageSource,
    PathSource,
    Source,
    load_catalog,
    package_folder,
)
from gateway.settings import load_settings, variables


def models(
    models: Annotated[Path | None, typer.Option(help="The file of models.")] = None,
) -> None:
    """List each model: id, kind, aliases, source and whether it is on disk."""
    settings = load_settings({"models": models})
    catalog = load_catalog(settings.models, variables())
    rows = [
        (
            spec.id,
            spec.kind,
            ", ".join(alias.name for alias in spec.aliases),
            str(spec.source),
            "yes" if on_disk(spec.source, settings.hub_cache) else "no",
        )
        for spec in catalog.specs
    ]
    show(("Id", "Kind", "Aliases", "Source", "On disk"), rows)


def on_disk(source: Source, hub_cache: Path | None) -> bool:
    """Tell whether a model's configuration and every file of its weights are here."""
    folder = _folder(source, hub_cache)
    if folder is None or not (folder / "config.json").is_file():
        return False
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(folder.glob("*.safetensors"))
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
    return all((folder / shard).is_file() for shard in shards)


def _folder(source: Source, hub_cache: Path | None) -> Path | None:
    match source:
        case PathSource(path):
            return path
        case PackageSource(module, inside):
            root = package_folder(module)
            return root / inside if root else None
        case HubSource(repo, revision):
            from huggingface_hub import try_to_load_from_cache

            found = try_to_load_from_cache(
                repo, "config.json", cache_dir=hub_cache, revision=revision
            )
            return Path(found).parent if isinstance(found, str) else None
