"""Tiny checkpoints, as they are and spoilt."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx

GOLDEN = Path(__file__).parents[2] / "golden"
TEXTS: list[str] = json.loads((GOLDEN / "texts.json").read_text())


def tiny(path: Path, name: str) -> Path:
    """Copy a checkpoint, to be spoilt."""
    return Path(shutil.copytree(GOLDEN / name, path / name))


def rewrite(file: Path, **changes: Any) -> None:
    """Change keys of a JSON object; one that is None goes."""
    whole = {**(json.loads(file.read_text()) if file.exists() else {}), **changes}
    file.write_text(json.dumps({key: value for key, value in whole.items() if value is not None}))


def read_weights(folder: Path) -> dict[str, mx.array]:
    loaded = mx.load(str(folder / "model.safetensors"))
    assert isinstance(loaded, dict)
    mx.eval(loaded)
    return loaded


def write_weights(folder: Path, weights: dict[str, mx.array]) -> None:
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
