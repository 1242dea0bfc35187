"""The JSON Schema of models.yaml."""

import json
from pathlib import Path

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml

from gateway.registry import json_schema

SHIPPED = Path(__file__).parents[2] / "models.yaml"


def test_the_schema_accepts_the_shipped_file() -> None:
    schema = json.loads(json.dumps(json_schema()))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(yaml.safe_load(SHIPPED.read_text()), schema)


@pytest.mark.parametrize(
    "wrong",
    [
        {"poolng": "mean"},
        {"pooling": "men"},
        {"preload": "yes"},
        {"max_context": 1},
        {"batching": "${X:-}"},
        {"source": "org/name"},
        {"matryoshka": [0]},
    ],
)
def test_the_schema_refuses_what_check_refuses(wrong: dict[str, object]) -> None:
    entry = {"kind": "embedding", "source": "hub:a/b", "max_context": "${X}", "aliases": None}
    schema = json_schema()
    jsonschema.validate({"version": 1, "models": {"m": entry}}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"version": 1, "models": {"m": {**entry, **wrong}}}, schema)


def test_every_key_of_the_schema_is_described() -> None:
    for name, definition in json_schema()["$defs"].items():
        for key, value in definition.get("properties", {}).items():
            assert "description" in value or "$ref" in str(value), f"{name}.{key}"
