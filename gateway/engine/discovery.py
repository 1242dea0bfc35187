"""Finds the models on this machine, and recognizes each model's kind.

A model of unclear kind is refused. The error suggests an entry of models.yaml that states the kind.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from huggingface_hub import constants

from gateway.engine.device import keep_file_limits
from gateway.engine.embedding.cross_encoder import HEADS
from gateway.engine.embedding.engine import ENCODERS
from gateway.engine.hub import Hub, has_weights
from gateway.engine.models.gguf.architectures import ARCHITECTURES
from gateway.engine.models.gguf.header import read_header
from gateway.errors import ModelRefused
from gateway.registry import is_gguf, parse_source

Kind: TypeAlias = Literal["chat", "embedding", "rerank"]

# Limit of a JSON file's bytes. tokenizer_config.json has up to two million.
MOST_BYTES: Final = 8_000_000
_OF_SENTENCES: Final = (
    "modules.json",
    "config_sentence_transformers.json",
    "1_Pooling/config.json",
)
# Values of model_type in config_sentence_transformers.json; PyLate's is `ColBERT`.
_EMBEDDERS: Final = ("SentenceTransformer", "SparseEncoder", "MultiVectorEncoder", "ColBERT")
_TEMPLATES: Final = ("chat_template.jinja", "chat_template.json")
TELLING: Final = (
    *("config.json", "adapter_config.json", "tokenizer_config.json"),
    *(*_OF_SENTENCES, *_TEMPLATES),
)
_NAMED: Final = re.compile(r"(rerank)|embed|retriev|\b(?:gte|bge|e5)\b")
# Suggested keys of models.yaml.
_EMBEDS: Final = "kind: embedding, pooling: {pooling}, normalize: true"
_SCORES: Final = "kind: rerank, scoring: labels"


class _Unclear(Exception):
    """A model's kind is unclear. Adding `keys` to models.yaml would state the kind."""

    def __init__(self, why: str, keys: str = "kind: …") -> None:
        super().__init__(why)
        self.keys = keys


def read_kind(files: Path | None, model: str, source: str) -> Kind:
    """Return a model's kind, or raise ModelRefused.

    `files` is a GGUF file or a folder, and the folder may lack weights. None means that a GGUF file
    isn't downloaded.
    """
    try:
        if files is not None and not is_gguf(files.name):
            return _of_folder(files, model)
        if files is not None:
            _require_chat(files)
        _require_plain_name(model)
        return "chat"
    except _Unclear as error:
        entry = f"{json.dumps(model)}: {{{error.keys}, source: {json.dumps(source)}}}"
        why = f"{error}. If you know what it is, say so in models.yaml: {entry}"
        raise ModelRefused(model, why) from None
    except (OSError, ValueError) as error:
        raise ModelRefused(model, f"{str(error).rstrip('.')}.") from error


def _require_plain_name(model: str) -> None:
    # mlx-lm converts embedding models to files that look like a chat model's, so the name is read.
    found = _NAMED.search(model.lower())
    if found is None:
        return
    does, keys = "embeds", _EMBEDS.format(pooling="last")
    if found[1]:
        does, keys = "ranks", _SCORES
    raise _Unclear(f"its name says that it {does}, but its files say that it chats", keys)


def _require_chat(file: Path) -> None:
    metadata = read_header(file).metadata
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ValueError(f"its architecture, {architecture!r:.60}, is not served from GGUF files")
    if f"{architecture}.pooling_type" in metadata or "tokenizer.chat_template" not in metadata:
        raise ValueError("it has no chat template, and GGUF files are served as chat models only")


def _of_folder(folder: Path, model: str) -> Kind:
    config = read_object(folder, "config.json")
    if not config:
        if (folder / "adapter_config.json").is_file():
            raise _Unclear("it is an adapter", "kind: chat, base: …, adapter: …")
        raise _Unclear("it has no config.json")
    kind, listed = str(config.get("model_type")), config.get("architectures")
    architectures = [str(name) for name in listed] if isinstance(listed, list) else []
    if any(name.endswith("ForSequenceClassification") for name in architectures):
        return _of_classifier(config, kind)
    if any(name.endswith(("Classification", "QuestionAnswering")) for name in architectures):
        raise _Unclear("it marks words of texts")
    if any((folder / name).is_file() for name in _OF_SENTENCES):
        task = read_object(folder, _OF_SENTENCES[1]).get("model_type", "SentenceTransformer")
        if task not in _EMBEDDERS:
            raise _Unclear(f"it is a {task!r:.60} of sentence-transformers", _SCORES)
        return "embedding"
    if "HF_ColBERT" in architectures:
        return "embedding"
    is_encoder = kind in ENCODERS or any(
        name.endswith(("Model", "ForMaskedLM")) and not name.endswith("LMHeadModel")
        for name in architectures
    )
    if is_encoder:
        keys = _EMBEDS.format(pooling="mean")
        raise _Unclear("its files do not say how token vectors become one", keys)
    return _of_decoder(folder, model, kind, config)


def _of_classifier(config: Mapping[str, Any], kind: str) -> Kind:
    labels = config.get("id2label")
    # transformers omits id2label for two labels.
    count = len(labels) if isinstance(labels, Mapping) else config.get("num_labels", 2)
    if kind not in HEADS or count != 1:
        what = f"{kind!r:.60} with {count!r:.60} labels"
        raise _Unclear(f"it classifies texts ({what}), which may not be ranking", "kind: rerank")
    return "rerank"


def _of_decoder(folder: Path, model: str, kind: str, config: Mapping[str, Any]) -> Kind:
    with keep_file_limits():
        from gateway.engine.models.checkpoint import ASSISTANTS
        from gateway.engine.models.decoders import is_known  # mlx-lm takes a second to import

    if "model_file" in config:
        raise _Unclear("it needs code of its own, which is never run")
    if kind in ASSISTANTS:
        what = "it only guesses tokens for a model of Gemma 4, whose `draft:` it may be"
        raise _Unclear(what, "kind: chat")
    if not re.fullmatch(r"\w[\w-]*", kind) or not is_known(kind):
        raise _Unclear(f"mlx-lm has no architecture {kind!r:.60}")
    templates = [name for name in _TEMPLATES if (folder / name).is_file()]
    if not templates and not read_object(folder, "tokenizer_config.json").get("chat_template"):
        raise _Unclear("it has no chat template", "kind: chat, chat_template: file:…")
    _require_plain_name(model)
    return "chat"


def read_object(folder: Path, name: str) -> dict[str, Any]:
    """Return the object in a JSON file, or {} if there is no file. Raises ValueError."""
    if not (folder / name).is_file():
        return {}
    with (folder / name).open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"{name} is longer than {MOST_BYTES:,} bytes")
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{name} doesn't contain a JSON object")
    return value


@dataclass(frozen=True, slots=True)
class Found:
    """A model on the disk."""

    model: str
    source: str  # written as in models.yaml
    kind: Kind | None  # None if the model is not served
    why: str = ""  # why the model is not served


def discover(places: Sequence[str], hub: Hub) -> Iterator[Found]:
    """Yield the models in `places`, which are `huggingface`, `lmstudio` or folders."""
    for place in places:
        if place == "huggingface":
            yield from _find_cached(hub.cache or Path(constants.HF_HUB_CACHE))
        elif place == "lmstudio":
            for folder in _lmstudio_folders(Path.home()):
                yield from _find_below(folder)
        else:
            yield from _find_below(Path(os.path.expanduser(place)).absolute())


def _find_cached(cache: Path) -> Iterator[Found]:
    """Yield each model once, in the revision `main` if that revision can be served."""
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
    pointed = Path(_read_line(home / ".lmstudio-home-pointer") or home / ".lmstudio")
    return [pointed / "models", home / ".cache" / "lm-studio" / "models"]


def _find_below(folder: Path, name: str = "", depth: int = 2) -> Iterator[Found]:
    files = _model_files(folder)
    yield from _each(files, name or folder.name, f"path:{folder}")
    if depth and folder not in files:  # folders inside a model are its parts
        for inner in _listed(folder):
            yield from _find_below(inner, f"{name}/{inner.name}".lstrip("/"), depth - 1)


def _each(files: Iterable[Path], name: str, source: str, commit: str = "") -> Iterator[Found]:
    for path in files:
        inner = f"/{path.name}" if is_gguf(path.name) else ""
        model = re.sub(r"[\s,]+", "-", name + inner)
        yield _found(path, model, f"{source}{inner}{commit}")


def _found(path: Path, model: str, source: str) -> Found:
    try:
        parse_source(source, path)  # raises for a part of a split model
        if not has_weights(path):
            return Found(model, source, None, "its weights are not here, or not all of them")
        return Found(model, source, read_kind(path, model, source))
    except Exception as error:  # one model's error must not hide the others
        return Found(model, source, None, getattr(error, "reason", str(error)))


def _model_files(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError, ValueError):
        names = sorted(entry.name for entry in os.scandir(folder))
        whole = [folder] if "config.json" in names else []
        return [*whole, *(folder / name for name in names if is_gguf(name))]
    return []


def _listed(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError, ValueError):
        return sorted(Path(entry) for entry in os.scandir(folder) if os.path.isdir(entry))
    return []


def _read_line(file: Path) -> str:
    with contextlib.suppress(OSError, ValueError):
        return file.read_text(encoding="utf-8").strip()
    return ""
