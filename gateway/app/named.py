"""Makes the catalog of served models from models.yaml, the settings and the disk.

The hub's client and mlx are imported late, since most calls need neither.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway.errors import GatewayError, ModelNotFound, shorten
from gateway.registry import (
    SCHEMES,
    Catalog,
    ChatSpec,
    Entries,
    HubSource,
    ModelSpec,
    Reading,
    Source,
    complete,
    find_entry,
    is_gguf,
    kind_variable,
    parse_source,
    read_models,
    read_short_names,
    similar_models,
    source_id,
    unlisted_entry,
)
from gateway.settings import Settings, variables

if TYPE_CHECKING:
    from gateway.engine.hub import Hub


def hub_of(settings: Settings, *, may_download: bool) -> "Hub":
    from gateway.engine.hub import Hub

    return Hub(
        endpoint=settings.hub_endpoint,
        cache=settings.hub_cache,
        timeout_s=settings.hub_timeout_s,
        may_download=may_download,
    )


def load_served(settings: Settings) -> Catalog:
    """Return the catalog of served models. Raises RegistryInvalid."""
    reading = read_served(settings)
    reading.require_valid()
    return reading.catalog


def read_served(settings: Settings, *, may_pull: bool | None = None) -> Reading:
    """Read the served models, and collect problems instead of raising them.

    If `may_pull`, the hub is asked for a missing model's kind. The default is GATEWAY_AUTO_PULL.
    """
    set_variables, known = variables(), read_short_names() if settings.serve else {}
    named: dict[str, Mapping[str, Any]] = {}
    entry: Mapping[str, Any]
    ids, problems, file = [], [], settings.models_file
    for text in settings.serve:
        try:
            source = parse_name(text)
            model = text if source is None else source_id(source)
            if source is not None:
                entry = {"source": str(source), **find_entry(source, known)}
                if not isinstance(source, HubSource) or source.revision is not None:
                    entry = {**entry, "source": str(source)}
            else:  # an id in models.yaml, or else a short name
                file = settings.models
                is_in_file = text in read_models(file, set_variables).catalog.names()
                entry = {} if is_in_file else known.get(text, {})
            if entry and named.get(model, entry)["source"] != entry["source"]:
                raise ValueError(f"{text}: another named model already has the id {model}")
            if source and "kind" not in entry and not set_variables.get(kind_variable(model)):
                entry = {**entry, "kind": _find_kind(source, model, settings, may_pull)}
            named |= {model: complete(entry, set_variables)} if entry else {}
            ids.append(model)
        except ModelNotFound as error:  # the hub has none of this name
            problems.append(f"{text}: {error.why}")
        except (GatewayError, ValueError, OSError) as error:
            problems.append(str(error))
    found, left_out = _discover(settings, set_variables)
    reading = read_models(file, set_variables, named, found)
    for model, entry in found.items():
        spec = reading.catalog.by_id(model)
        if spec is not None and not _is_same(spec.source, str(entry["source"])):
            left_out[str(entry["source"])] = f"another model is served as {model}"
    valid = reading.catalog.names()
    if not reading.problems:
        problems += [_unknown(name, [*valid, *known]) for name in ids if name not in valid]
    if problems or reading.problems:
        return replace(reading, catalog=Catalog(()), problems=(*problems, *reading.problems))
    catalog = _select(reading.catalog, ids, settings, found)
    return replace(reading, catalog=catalog, left_out={**left_out, **reading.left_out})


def _unknown(name: str, valid: list[str]) -> str:
    """Say that no model has a name, with the nearest ones and a command to type next.

    None is served in its place: clients ask by the name that was typed, and elsewhere it may be
    another file.
    """
    problem = f"{shorten(name)}: not in models.yaml or the catalogue, and the hub's are org/name."
    return f"{problem} {name_nearest(name, valid, 'serve', 'models recommend')}"


def name_nearest(name: str, valid: Iterable[str], verb: str, other: str) -> str:
    """Name the nearest models, and the command of this verb to type next; if none is near, the
    other command.
    """
    near = similar_models(name, valid, 3)
    if not near:
        return f"Run `mlx-gateway {other}`."
    return f"Nearest: {', '.join(near)}. Run `mlx-gateway {verb} {near[0]}`."


def parse_name(text: str) -> Source | None:
    """Return the source that a name stands for, or None if it is an id or a short name.

    An existing path is preferred to a repository of the same name. Raises ValueError if the source
    is invalid.
    """
    path = os.path.expanduser(text)
    if text.partition(":")[0] in SCHEMES:
        return parse_source(text, Path.cwd())
    is_there = os.path.isdir(path) or (is_gguf(path) and os.path.isfile(path))
    if is_there or text.startswith((".", "/", "~")):
        return parse_source(f"path:{text}", Path.cwd())
    return parse_source(f"hub:{text}", Path.cwd()) if "/" in text else None


def _is_same(one: Source, other: str) -> bool:
    """Return True if two sources differ only in revision."""
    repo, *_ = str(one).split("@")
    return repo == str(parse_source(other, Path.cwd())).split("@")[0]


def _find_kind(source: Source, model: str, settings: Settings, may_pull: bool | None) -> str:
    from gateway.engine.discovery import read_kind
    from gateway.engine.hub import on_disk
    from gateway.engine.hub_offer import look

    hub = hub_of(settings, may_download=settings.auto_pull if may_pull is None else may_pull)
    files = on_disk(ChatSpec.model_construct(id=model, kind="chat", source=source), hub)
    if files is None:
        assert isinstance(source, HubSource), "on_disk raises for other missing sources"
        return look(source, hub, model).kind
    return read_kind(files, model, str(source))


def _discover(settings: Settings, given: Mapping[str, str]) -> tuple[Entries, dict[str, str]]:
    if not settings.discover:
        return {}, {}
    from gateway.engine.discovery import discover

    found: dict[str, Mapping[str, Any]] = {}
    left_out: dict[str, str] = {}
    for model in discover(settings.discover, hub_of(settings, may_download=False)):
        if model.kind is None:
            left_out[model.model] = model.why
        elif model.model in found:
            left_out[model.source] = f"another model is found as {model.model}"
        else:
            found[model.model] = unlisted_entry(model.kind, model.source, given)
    return found, {name: why for name, why in left_out.items() if name not in found}


def _select(catalog: Catalog, ids: list[str], settings: Settings, found: Entries) -> Catalog:
    """Return a catalog of the named models, which are preloaded, and then of the others."""
    chosen: dict[str, ModelSpec] = {}
    for name in ids:
        spec = catalog.resolve(name).spec
        chosen[spec.id] = spec.model_copy(update={"preload": True})
        base = getattr(spec, "base_spec", None)
        if base is not None:
            chosen.setdefault(base.id, base)
    has_file = settings.models_file is not None
    rest = (spec for spec in catalog.specs if has_file or spec.id in found)
    return Catalog([*chosen.values(), *(spec for spec in rest if spec.id not in chosen)])
