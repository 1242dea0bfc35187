"""The registry reads models.yaml into a spec for each model, which is found by id or alias.

models_yaml  reads the file into a catalog, or lists all problems with their lines
yaml_reader  parses YAML into values with their lines; replaces ${VAR:-default} in the values
variables    GATEWAY_<ID>_<KEY>: environment variables for the keys of models
specs        the keys of an entry of each kind of model, with types and bounds
fields       the types of the keys' values, and how they are read
sources      the places of models' files: hub, folder, installed package
short_names  models that come with the gateway under short names, and facts about them
catalog      the models of models.yaml, found by id or alias; immutable
schema       the JSON Schema of models.yaml, for editors
names        formats of tool calls and of thinking; finds the valid names nearest to a wrong one
"""

from gateway.registry.catalog import Catalog, Changes, Resolved, load_alike
from gateway.registry.models_yaml import Entries, Reading, load_catalog, read_models
from gateway.registry.names import similar_models
from gateway.registry.schema import json_schema
from gateway.registry.short_names import (
    Facts,
    LayersKept,
    complete,
    find_entry,
    read_facts,
    read_short_names,
    unlisted_entry,
)
from gateway.registry.sources import (
    SCHEMES,
    HubSource,
    PackageSource,
    PathSource,
    Source,
    install_command,
    is_gguf,
    package_folder,
    packaged,
    parse_source,
    repository_of,
    source_id,
    stays_inside,
)
from gateway.registry.specs import (
    Alias,
    ChatBatching,
    ChatSpec,
    EmbeddingBatching,
    EmbeddingSpec,
    Inputs,
    ModelSpec,
    RerankSpec,
    Sampling,
)
from gateway.registry.variables import kind_variable

__all__ = [
    "SCHEMES",
    "Alias",
    "Catalog",
    "Changes",
    "ChatBatching",
    "ChatSpec",
    "EmbeddingBatching",
    "EmbeddingSpec",
    "Entries",
    "Facts",
    "HubSource",
    "Inputs",
    "LayersKept",
    "ModelSpec",
    "PackageSource",
    "PathSource",
    "Reading",
    "RerankSpec",
    "Resolved",
    "Sampling",
    "Source",
    "complete",
    "find_entry",
    "install_command",
    "is_gguf",
    "json_schema",
    "kind_variable",
    "load_alike",
    "load_catalog",
    "package_folder",
    "packaged",
    "parse_source",
    "read_facts",
    "read_models",
    "read_short_names",
    "repository_of",
    "similar_models",
    "source_id",
    "stays_inside",
    "unlisted_entry",
]
