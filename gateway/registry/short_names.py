"""Reads catalogue.yaml, whose entries are like those of models.yaml, but also have `facts`."""

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field

from gateway.errors import RegistryInvalid
from gateway.registry.sources import Source, parse_source, repository_of, source_id
from gateway.registry.specs import Section
from gateway.registry.yaml_reader import read_yaml

FACTS = "facts"
STRUCTURED_ROWS = 8  # `structured.rows` of every chat model that comes with the gateway


class LayersKept(Section):
    """A group of layers that keep a sequence's state in the same way."""

    layers: int = Field(ge=1)
    # Attention: keys and values of each token, or of the last `window` tokens.
    kv_heads: int = Field(default=0, ge=0)
    head_dim: int = Field(default=0, ge=0)
    window: int | None = Field(default=None, ge=1)
    # Latent attention: one vector of each token, with its rotary part and index key.
    latent_dim: int = Field(default=0, ge=0)
    # Gated DeltaNet: a state of fixed size, with key and value heads of `head_dim`.
    key_heads: int = Field(default=0, ge=0)
    value_heads: int = Field(default=0, ge=0)


class Facts(Section):
    """Facts about a model. `unread` names the facts that were not found."""

    architecture: str = Field(min_length=1)  # config.json's `model_type`
    weights_bytes: int | None = Field(default=None, ge=1)
    context: int | None = Field(default=None, ge=1)
    images: bool | None = None  # True: its files include a vision tower
    mtp_head: bool | None = None  # True: its files include a head that guesses tokens
    is_coder: bool = False  # made for coding agents, so not the one to take for all chats
    kv: tuple[LayersKept, ...] = ()
    parameters_b: float | None = Field(default=None, gt=0)  # billions, with all experts
    active_b: float | None = Field(default=None, gt=0)  # billions of parameters that a token uses
    read_from: tuple[str, ...] = Field(min_length=1)
    read_on: str
    unread: tuple[str, ...] = ()


def read_short_names() -> Mapping[str, Mapping[str, Any]]:
    return {
        name: {key: value for key, value in entry.items() if key != FACTS}
        for name, entry in _entries().items()
    }


def find_entry(source: Source, known: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the known entry of the same repository, at any revision, or an empty one."""
    repository = repository_of(source)
    for entry in known.values():
        if source_id(parse_source(str(entry["source"]), Path.cwd())) == repository:
            return entry
    return {}


def unlisted_entry(kind: str, source: str, variables: Mapping[str, str]) -> Mapping[str, Any]:
    """Return an entry for a model that was found on disk or asked for.

    It has the keys of a short name for the same repository, except `aliases`.
    """
    known = find_entry(parse_source(source, Path.cwd()), read_short_names())
    keys = {} if known.get("kind") != kind else known
    entry = {**keys, "kind": kind, "source": source}
    entry.pop("aliases", None)
    return complete(entry, variables)


def complete(entry: Mapping[str, Any], variables: Mapping[str, str]) -> Mapping[str, Any]:
    """Complete an entry that is not in models.yaml: chat models get `structured.rows`."""
    if entry.get("kind") != "chat":
        return entry
    structured = {"rows": STRUCTURED_ROWS, **(entry.get("structured") or {})}
    if variables.get("GATEWAY_STRUCTURED_ROWS"):
        del structured["rows"]
    return {**entry, "structured": structured}


def read_facts() -> Iterator[tuple[str, str, Facts]]:
    for name, entry in _entries().items():
        yield name, entry["kind"], Facts.model_validate(entry[FACTS])


@cache
def _entries() -> Mapping[str, Mapping[str, Any]]:
    """Return the entries of catalogue.yaml, from the wheel or the checkout's root."""
    package = Path(__file__).parents[1]
    files = (folder / "catalogue.yaml" for folder in (package, package.parent))
    file = next(file for file in files if file.is_file())
    document = read_yaml(file.read_text(encoding="utf-8"), {})
    if document.problems:
        raise RegistryInvalid([f"{file}:{line}: {text}" for line, text in document.problems])
    entries: Mapping[str, Mapping[str, Any]] = document.value["models"]
    return entries
