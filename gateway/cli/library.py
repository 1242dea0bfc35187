"""The commands about the models on this machine and in the running gateway."""

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal

import typer

from gateway.app.named import load_served, parse_name
from gateway.cli import lazy
from gateway.cli.gateways import address, count_requests, find, list_running, manage
from gateway.cli.models import disk_state, list_models
from gateway.cli.terminal import (
    Discover,
    GatewayPort,
    ModelName,
    ModelsFile,
    complete_model,
    fail,
    flags_of,
)
from gateway.cli.terminal import show as show_table
from gateway.logs import human_bytes
from gateway.registry import ChatSpec, ModelSpec, is_gguf, source_id
from gateway.settings import Settings, load_settings

STOP = """\
To unload a model, name it: mlx-gateway stop MODEL (mlx-gateway ps lists those that are loaded).
To end a gateway, press Ctrl-C where it runs, or stop its service."""


def list_(models: ModelsFile = None, discover: Discover = False) -> None:
    """List the models: id, kind, whether they are on disk, and their size."""
    list_models(load_settings(flags_of(models, None, discover=discover)), is_long=False)


def show(model: ModelName, models: ModelsFile = None) -> None:
    """Describe a model: its source, files, context, formats, and its keys of models.yaml."""
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
            if isinstance(spec, ChatSpec) and not is_gguf(files.name):
                yield from _formats(spec, files)
    given = spec.model_dump(exclude_unset=True, exclude={"id", "kind", "source", "aliases"})
    for key, value in given.items():
        yield key, json.dumps(value, default=str, ensure_ascii=False)


def _formats(spec: ChatSpec, files: Path) -> Iterator[tuple[str, str]]:
    """Yield the formats that a template tells. The load also looks at the vocabulary."""
    kind = str(json.loads((files / "config.json").read_bytes()).get("model_type"))
    tokenizer = json.loads((files / "tokenizer_config.json").read_bytes())
    own, declared = files / "chat_template.jinja", tokenizer.get("tool_parser_type")
    written = own.read_text(encoding="utf-8") if own.is_file() else tokenizer.get("chat_template")
    text = spec.chat_template or str(written or "")
    yield "template", f"{len(text):,} characters" if text else "none"
    yield "tools", spec.tool_parser or lazy.infer_tools((), text, kind, declared) or "none"
    yield "thoughts", spec.reasoning_parser or lazy.infer_reasoning((), text, kind)


def ps(port: GatewayPort = None) -> None:
    """List the running gateway's loaded models: memory, time idle, requests in flight."""
    settings = load_settings({"port": port})
    url, rows = _require_running(settings), []
    counts = count_requests(url, settings)
    for model in list_running(url, settings):
        if model["id"] == model["root"] and model["state"] != "unloaded":
            used, nbytes = model["last_used"], model["bytes"]
            idle = str(timedelta(seconds=max(0, int(time.time() - used)))) if used else ""
            memory, count = human_bytes(nbytes) if nbytes else "", str(counts.get(model["id"], 0))
            rows.append((model["id"], model["kind"], model["state"], memory, idle, count))
    if rows:
        show_table(("Model", "Kind", "State", "Memory", "Idle", "In flight"), rows)
    else:
        print("No model is loaded; a request loads one, or `mlx-gateway load`.", file=sys.stderr)


def load(model: ModelName, port: GatewayPort = None) -> None:
    """Load a model in the running gateway. The gateway downloads what is missing."""
    name, _ = _manage(model, "load", load_settings({"port": port}))
    print(f"{name} is loaded.")


def stop(
    model: Annotated[
        str | None, typer.Argument(help="The model to unload.", autocompletion=complete_model)
    ] = None,
    port: GatewayPort = None,
) -> None:
    """Unload a model from the running gateway, which goes on to serve the others."""
    if model is None:
        fail(STOP, 2)
    name, is_gone = _manage(model, "unload", load_settings({"port": port}))
    end = "is unloaded" if is_gone else "will be unloaded when its requests end"
    print(f"{name} {end}; a later request loads it again.")


def _manage(model: str, action: Literal["load", "unload"], settings: Settings) -> tuple[str, bool]:
    url = _require_running(settings)
    try:
        source = parse_name(model)
    except ValueError as error:
        fail(error, 2)
    name = model if source is None else source_id(source)
    return name, manage(url, settings, name, action)


def _require_running(settings: Settings) -> str:
    url, where = find(settings), address(settings) or "a known port"
    if url is None:
        fail(f"No gateway answers at {where}. Name its --port, or run:\n  mlx-gateway serve")
    return url
