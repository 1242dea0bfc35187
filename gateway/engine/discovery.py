"""Models that lie on this machine: in Hugging Face's cache, LM Studio's folder, or any folder.

Nothing is fetched and nobody is asked.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants

from gateway.engine.hub import Hub, has_weights
from gateway.engine.kind import Kind, read_kind
from gateway.registry import is_gguf, parse_source


@dataclass(frozen=True, slots=True)
class Found:
    """A model on the disk; without a kind, `why` it is not served."""

    model: str
    source: str  # as models.yaml has it
    kind: Kind | None
    why: str = ""


def discover(places: Sequence[str], hub: Hub) -> Iterator[Found]:
    """Yield the models of `huggingface`, `lmstudio` or folders, by place and name."""
    for place in places:
        if place == "huggingface":
            yield from _find_cached(hub.cache or Path(constants.HF_HUB_CACHE))
        elif place == "lmstudio":
            for folder in _lmstudio_folders(Path.home()):
                yield from _find_below(folder)
        else:
            yield from _find_below(Path(os.path.expanduser(place)).absolute())


def _find_cached(cache: Path) -> Iterator[Found]:
    """Yield the models of Hugging Face's cache, each at main's commit or else one that is whole."""
    for repo in _listed(cache):
        if not repo.name.startswith("models--"):
            continue
        name = repo.name.removeprefix("models--").replace("--", "/", 1)
        main = _read_line(repo / "refs" / "main")
        folders = sorted(_listed(repo / "snapshots"), key=lambda folder: folder.name != main)
        models: dict[str, Found] = {}
        for folder in folders:
            for model in _each(_model_files(folder), name, f"hub:{name}", f"@{folder.name}"):
                if models.setdefault(model.model, model).kind is None:
                    models[model.model] = model
        yield from models.values()


def _lmstudio_folders(home: Path) -> list[Path]:
    """Return the folders that LM Studio keeps models in: its home is where a file in ours says."""
    pointed = Path(_read_line(home / ".lmstudio-home-pointer") or home / ".lmstudio")
    return [pointed / "models", home / ".cache" / "lm-studio" / "models"]


def _find_below(folder: Path, name: str = "", depth: int = 2) -> Iterator[Found]:
    """Yield the models of a folder: itself, those in it, and those of each publisher in it."""
    files = _model_files(folder)
    yield from _each(files, name or folder.name, f"path:{folder}")
    if depth and folder not in files:  # else they are its modules
        for inner in _listed(folder):
            yield from _find_below(inner, f"{name}/{inner.name}".lstrip("/"), depth - 1)


def _each(files: Iterable[Path], name: str, source: str, commit: str = "") -> Iterator[Found]:
    """Yield each model of a folder: itself, and its GGUF files."""
    for path in files:
        inner = f"/{path.name}" if is_gguf(path.name) else ""
        model = re.sub(r"[\s,]+", "-", name + inner)
        yield _found(path, model, f"{source}{inner}{commit}")


def _found(path: Path, model: str, source: str) -> Found:
    try:
        parse_source(source, path)  # which refuses one piece of a model
        if not has_weights(path):
            return Found(model, source, None, "its weights are not here, or not all of them")
        return Found(model, source, read_kind(path, model, source))
    except Exception as error:  # whatever lies there, others are served
        return Found(model, source, None, getattr(error, "reason", str(error)))


def _model_files(folder: Path) -> list[Path]:
    """Return the folder if it is a model's, and its GGUF files."""
    with contextlib.suppress(OSError, ValueError):
        names = sorted(entry.name for entry in os.scandir(folder))
        whole = [folder] if "config.json" in names else []
        return [*whole, *(folder / name for name in names if is_gguf(name))]
    return []


def _listed(folder: Path) -> list[Path]:
    """Return the folders in one, by name; none of what cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return sorted(Path(entry) for entry in os.scandir(folder) if os.path.isdir(entry))
    return []


def _read_line(file: Path) -> str:
    with contextlib.suppress(OSError, ValueError):
        return file.read_text(encoding="utf-8").strip()
    return ""
