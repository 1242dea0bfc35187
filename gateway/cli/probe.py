"""The facts for doctor that need mlx, as JSON: a process of its own, since mlx may crash it.

    python -m gateway.cli.probe [models.yaml]

It reads the settings as doctor does. Models that are not on disk have no size.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

from huggingface_hub import constants

from gateway.app.engines import MlxEngines
from gateway.app.limits import budget_bytes
from gateway.app.named import hub_of
from gateway.app.self_tests import verdict_store
from gateway.cli.doctor import COMPILED
from gateway.cli.gateways import kept_tokens
from gateway.engine.blas import BLAS, cache_folder
from gateway.engine.compiled_code import FOLDER
from gateway.engine.device import gflops, multiply
from gateway.engine.hub import on_disk
from gateway.engine.inputs import read_inputs
from gateway.errors import GatewayError
from gateway.registry import ModelSpec, read_models
from gateway.settings import Settings, load_settings, variables


def main() -> None:
    """Compute a little on the device, and print its facts and each model's size."""
    settings = load_settings({"models": Path(sys.argv[1]) if sys.argv[1:] else None})
    engines = MlxEngines(settings)
    engines.begin()
    multiply()
    catalog = read_models(settings.models, variables()).catalog
    specs = catalog.specs
    sizes = {spec.id: _size(spec, engines, settings) for spec in specs}
    kept = {spec.id: kept_tokens(spec.id, catalog, settings) for spec in specs}
    inputs = {spec.id: read_inputs(spec, hub_of(settings, may_download=False)) for spec in specs}
    limit_bytes = budget_bytes(settings, engines.memory_bytes)
    folders = {
        "models": settings.hub_cache or constants.HF_HUB_CACHE,
        "self-tests": verdict_store(settings).folder,
        "kept prompts": settings.prefix_folder,
        "OpenBLAS's copy": cache_folder(os.environ, "openblas") if BLAS.kind == "wheel" else None,
        COMPILED: FOLDER if engines.device != "metal" else None,
        "temporary files": os.environ.get("TMPDIR") or "/tmp",
    }
    facts = {
        "device": engines.device,
        "limit_bytes": limit_bytes,
        "sizes": sizes,
        "kept": kept,
        "contexts": {name: each.max_tokens for name, each in inputs.items() if each is not None},
        "blas": BLAS.described,
        "blas_hint": BLAS.hint,
        "gflops": gflops(),
        "folders": {content: str(folder) for content, folder in folders.items() if folder},
    }
    print(json.dumps(facts))
    engines.end()


def _size(spec: ModelSpec, engines: MlxEngines, settings: Settings) -> int | str | None:
    """Return the bytes a model would hold, or its problem; None if it is not on disk."""
    try:
        folder = on_disk(spec, hub_of(settings, may_download=False))
        if folder is None:
            return None
        size = asyncio.run(engines.size(spec, folder))
    except GatewayError as error:
        return str(error)
    return size.weights + size.kv


if __name__ == "__main__":
    main()
