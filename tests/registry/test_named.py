"""Models that no file has, named or found, are read as a file's entries are."""

from pathlib import Path

from gateway.registry import read_models

CHAT = {"kind": "chat", "source": "hub:org/name"}
FILE = """version: 1
models:
  mine: {kind: chat, source: hub:org/mine, aliases: [name]}
  org/name: {kind: chat, source: hub:org/name, max_context: 64}
"""


def written(folder: Path) -> Path:
    (folder / "models.yaml").write_text(FILE)
    return folder / "models.yaml"


def test_named_models_come_first_and_found_ones_last(tmp_path: Path) -> None:
    """The file's other fields of a named model stay."""
    named, found = {"a/b": CHAT, "org/name": CHAT}, {"c/d": CHAT, "mine": CHAT, "a/b": {}}
    reading = read_models(written(tmp_path), {}, named, found)
    assert reading.problems == ()
    assert [spec.id for spec in reading.catalog.specs] == ["a/b", "org/name", "mine", "c/d"]
    assert reading.catalog.resolve("org/name").spec.max_context == 64
    assert str(reading.catalog.resolve("mine").spec.source) == "hub:org/mine"


def test_a_named_model_is_found_without_its_organization_where_that_is_free(tmp_path: Path) -> None:
    reading = read_models(written(tmp_path), {}, {"a/free": CHAT, "b/free": CHAT, "a/name": CHAT})
    assert reading.problems == ()
    assert reading.catalog.resolve("free").spec.id == "a/free"
    assert reading.catalog.resolve("name").spec.id == "mine"


def test_variables_set_keys_of_named_models_without_any_file() -> None:
    variables = {"GATEWAY_ORG_NAME_MAX_CONTEXT": "99", "GATEWAY_ORG_NAME_ALIASES": "gpt-x"}
    reading = read_models(None, variables, {"org/name": CHAT})
    assert reading.catalog.resolve("gpt-x").spec.max_context == 99
    assert reading.catalog.resolve("name").spec.id == "org/name"
    assert reading.variables >= variables.keys()


def test_problems_of_named_models_name_the_model_and_the_variable() -> None:
    variables = {"GATEWAY_ORG_NAME_MAX_CONTEXT": "7"}
    [problem] = read_models(None, variables, {"org/name": CHAT}).problems
    assert problem.startswith("org/name: `max_context` should be greater than or equal to 8")
    assert problem.endswith("(set by GATEWAY_ORG_NAME_MAX_CONTEXT)")
    [problem] = read_models(None, {}, {"a b": CHAT}).problems
    assert "a b: `id`" in problem


def test_a_found_model_that_cannot_be_served_is_left_out(tmp_path: Path) -> None:
    """The variables of a folder called model would be a setting's, and two others each other's."""
    found = {"model": CHAT, "a b": CHAT, "x/y-1": CHAT, "x/y.1": CHAT, "fine": CHAT}
    reading = read_models(written(tmp_path), {}, {}, found)
    assert reading.problems == ()
    assert reading.left_out.keys() == {"model", "a b", "x/y.1"}
    assert "GATEWAY_MODEL_TTL_S is a setting" in reading.left_out["model"]
    served = [spec.id for spec in reading.catalog.specs]
    assert served == ["mine", "org/name", "x/y-1", "fine"]
