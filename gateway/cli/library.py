"""The commands about the models on this machine and in the running gateway."""

import contextlib
import json
import shlex
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Literal

from gateway import logs
from gateway.app.named import load_served, parse_name
from gateway.cli import lazy
from gateway.cli.gateways import list_running, manage, require_running
from gateway.cli.models import disk_state, list_models
from gateway.cli.progress import loading
from gateway.cli.terminal import (
    Discover,
    GatewayPort,
    ModelName,
    ModelsFile,
    fail,
    flags_of,
)
from gateway.cli.terminal import show as show_table
from gateway.logs import human_bytes
from gateway.registry import ModelSpec, source_id
from gateway.settings import Settings, load_settings


def list_(models: ModelsFile = None, discover: Discover = False) -> None:
    """List the models that are served or on the disk: id, kind, and size."""
    settings = load_settings(flags_of(models, None, discover=discover))
    list_models(settings, is_long=False, with_others=True)


def show(model: ModelName, models: ModelsFile = None) -> None:
    """Describe a model: its source, files, context, and its keys of models.yaml."""
    settings = load_settings({"models": models})
    catalog = load_served(settings)
    if model not in catalog.names():
        catalog = load_served(settings.model_copy(update={"serve": (model,)}))
        model = catalog.specs[0].id
    show_table(("Key", "Value"), list(_describe(catalog.resolve(model).spec, settings)))


def _describe(spec: ModelSpec, settings: Settings) -> Iterator[tuple[str, str]]:
    hub = lazy.hub_of(settings, may_download=False)
    yield "id", spec.id
    yield "kind", spec.kind
    yield "aliases", ", ".join(alias.name for alias in spec.aliases)
    yield "source", str(spec.source)
    yield "on disk", " ".join(disk_state(spec, hub)).strip()
    with contextlib.suppress(Exception):  # `disk_state` has reported it
        files = lazy.hub.on_disk(spec, hub)
        inputs = lazy.inputs.read_inputs(spec, hub)
        if files is not None and inputs is not None:
            yield "path", str(files)
            yield "context", f"{inputs.max_tokens:,} tokens" if inputs.max_tokens else "unknown"
            yield "reads", ", ".join(inputs.modalities)
    given = spec.model_dump(exclude_unset=True, exclude={"id", "kind", "source", "aliases"})
    for key, value in given.items():
        yield key, json.dumps(value, default=str, ensure_ascii=False)


def ps(port: GatewayPort = None) -> None:
    """List the running gateway's loaded models: memory, and time idle."""
    settings = load_settings({"port": port})
    url, rows = require_running(settings, port), []
    for model in list_running(url, settings):
        if model["id"] == model["root"] and model["state"] != "unloaded":
            used, nbytes = model["last_used"], model["bytes"]
            idle = str(timedelta(seconds=max(0, int(time.time() - used)))) if used else ""
            memory = human_bytes(nbytes) if nbytes else ""
            rows.append((model["id"], model["kind"], model["state"], memory, idle))
    if rows:
        show_table(("Model", "Kind", "State", "Memory", "Idle"), rows)
    else:
        print("No model is loaded; a request loads one, or `mlx-gateway load`.", file=sys.stderr)


def load(model: ModelName, port: GatewayPort = None) -> None:
    """Load a model in the running gateway. The gateway downloads what is missing."""
    settings = load_settings({"port": port})
    try:
        with loading(logs.one_line(model)):
            name, _ = _manage(model, "load", settings, port)
    except KeyboardInterrupt:
        fail(f"{model} goes on loading; to end that:\n  mlx-gateway stop {shlex.quote(model)}", 130)
    print(f"{logs.one_line(name)} is loaded.")


def stop(model: ModelName, port: GatewayPort = None) -> None:
    """Unload a model from the running gateway, which goes on to serve the others.

    No command ends a gateway: press Ctrl-C where it runs, or stop its service.
    """
    name, is_gone = _manage(model, "unload", load_settings({"port": port}), port)
    end = "is unloaded" if is_gone else "will be unloaded when its requests end"
    print(f"{logs.one_line(name)} {end}; a later request loads it again.")


def _manage(
    model: str, action: Literal["load", "unload"], settings: Settings, port: int | None
) -> tuple[str, bool]:
    url = require_running(settings, port)
    try:
        source = parse_name(model)
    except ValueError as error:
        fail(error, 2)
    name = model if source is None else source_id(source)
    return name, manage(url, settings, name, action)
