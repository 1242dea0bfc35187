"""The models that doctor checks, and its report on those that are not here."""

from pathlib import Path

import pytest

from gateway.cli.doctor import check_model_files, choose
from gateway.registry import (
    ChatSpec,
    EmbeddingSpec,
    HubSource,
    ModelSpec,
    PackageSource,
    load_catalog,
)
from gateway.settings import Settings

FAR = ChatSpec(id="far", kind="chat", source=HubSource("org/far"))
NEAR = ChatSpec(id="near", kind="chat", source=HubSource("org/near"))
ABOARD = ChatSpec(id="aboard", kind="chat", source=PackageSource("nobody_has_this", "model"))
VECTORS = EmbeddingSpec(id="vectors", kind="embedding", source=HubSource("org/vectors"))


def chosen(*specs: ModelSpec) -> list[str]:
    return [each.id for each in choose(specs, lambda spec: spec is NEAR)]


def test_one_of_each_kind_is_checked() -> None:
    assert chosen(FAR, NEAR, ABOARD, VECTORS) == ["vectors", "aboard"]
    assert chosen(FAR, NEAR) == ["near"]
    assert chosen(FAR) == ["far"]
    assert chosen() == []


def test_an_adapter_is_skipped_for_its_base(tmp_path: Path) -> None:
    """Alone it is no model, and was said to lack its weights."""
    (tmp_path / "models.yaml").write_text(
        "version: 1\nmodels:\n  base: {kind: chat, source: 'path:.'}\n"
        "  small: {kind: chat, base: base, adapter: 'path:.'}\n"
    )
    spec = load_catalog(tmp_path / "models.yaml", {}).by_id("small")
    assert spec is not None
    found = check_model_files(spec, Settings(hub_cache=tmp_path))
    assert found is not None
    assert (found.state, found.message[-12:]) == ("skip", "--model base")


@pytest.mark.parametrize(
    ("spec", "command"),
    [(FAR, "Run: mlx-gateway pull far"), (ABOARD, "Run: pip install --no-deps nobody-has-this")],
)
def test_a_model_that_is_absent_is_skipped_with_what_adds_it(
    spec: ModelSpec, command: str, tmp_path: Path
) -> None:
    found = check_model_files(spec, Settings(hub_cache=tmp_path))
    assert found is not None
    assert (found.state, found.message[-len(command) :]) == ("skip", command)
