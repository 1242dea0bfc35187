"""The registry: models.yaml → ModelSpec by id and alias.

sources    where a model's files come from: hub, folder, installed package
sections   the parts of a spec: names, and what overrides settings
specs      what the file may say of each model, with types and bounds
catalog    an immutable snapshot that finds a model by id or alias
expansion  ${VAR:-default} in any value
placed     YAML text → plain values that remember their line
modelfile  the file → catalog, or every problem with its line
schema     the file's JSON Schema, for editors
"""

from gateway.registry.catalog import Catalog, Changes, Resolved, load_alike
from gateway.registry.modelfile import Reading, load_catalog, read_models
from gateway.registry.schema import json_schema
from gateway.registry.sections import Alias, ChatBatching, EmbeddingBatching, Sampling
from gateway.registry.sources import (
    HubSource,
    PackageSource,
    PathSource,
    Source,
    is_gguf,
    package_folder,
    parse_source,
)
from gateway.registry.specs import ChatSpec, EmbeddingSpec, ModelSpec

__all__ = [
    "Alias",
    "Catalog",
    "Changes",
    "ChatBatching",
    "ChatSpec",
    "EmbeddingBatching",
    "EmbeddingSpec",
    "HubSource",
    "ModelSpec",
    "PackageSource",
    "PathSource",
    "Reading",
    "Resolved",
    "Sampling",
    "Source",
    "is_gguf",
    "json_schema",
    "load_alike",
    "load_catalog",
    "package_folder",
    "parse_source",
    "read_models",
]
