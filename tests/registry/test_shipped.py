"""The models.yaml that is shipped."""

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from gateway.registry import ChatSpec, EmbeddingSpec, RerankSpec, load_catalog, read_models
from gateway.registry.specs import SPECS

SHIPPED = Path(__file__).parents[2] / "models.yaml"


def test_the_shipped_file_is_valid(tmp_path: Path) -> None:
    """Ids, aliases and kinds are as documented (weights elsewhere, so none are needed)."""
    here = f"path:{tmp_path}"
    variables = {"GATEWAY_SMOLLM2_135M_SOURCE": here, "GATEWAY_ALL_MINILM_L6_V2_SOURCE": here}
    catalog = load_catalog(SHIPPED, variables)
    for name in ("text-embedding-3-small", "qwen3-embedding-0.6b", "qwen3-embedding-4b-query"):
        assert isinstance(catalog.resolve(name).spec, EmbeddingSpec)
    for name in ("gpt-4.1-mini", "gpt-6-luna", "qwen3-4b-instruct", "qwen3-0.6b-no-think"):
        assert isinstance(catalog.resolve(name).spec, ChatSpec)
    preloaded = [spec.id for spec in catalog.specs if spec.preload]
    assert preloaded == ["all-minilm-l6-v2", "smollm2-135m"]
    minilm = catalog.resolve("all-minilm-l6-v2").spec
    assert isinstance(minilm, EmbeddingSpec)
    assert (minilm.overflow, minilm.matryoshka, minilm.token_ids) == ("truncate", False, "reject")


def test_shipped_hub_models_are_pinned_and_not_preloaded() -> None:
    """What is downloaded is what was meant, and only when asked for."""
    hub = [
        entry
        for entry in yaml.safe_load(SHIPPED.read_text())["models"].values()
        if entry["source"].startswith("hub:")
    ]
    assert len(hub) == 4
    for entry in hub:
        assert len(entry["source"].rpartition("@")[2]) == 40
        assert not entry.get("preload", False)


def test_rerank_models_are_valid_once_their_hash_is_deleted(tmp_path: Path) -> None:
    text = SHIPPED.read_text().replace("  # bge", "  bge").replace("  # qwen3-r", "  qwen3-r")
    file = tmp_path / "models.yaml"
    file.write_text(text)
    here = f"path:{tmp_path}"
    variables = {"GATEWAY_SMOLLM2_135M_SOURCE": here, "GATEWAY_ALL_MINILM_L6_V2_SOURCE": here}
    specs = load_catalog(file, variables).specs
    scoring = {spec.id: spec.scoring for spec in specs if isinstance(spec, RerankSpec)}
    assert scoring == {"bge-reranker-v2-m3": "head", "qwen3-reranker-0.6b": "labels"}


def test_every_shipped_knob_has_its_variable() -> None:
    """A key's variable is GATEWAY_, the id and the key, and so is a section's."""
    reading = read_models(SHIPPED, {})
    wanted = set()
    for name, entry in yaml.safe_load(SHIPPED.read_text())["models"].items():
        stem = "GATEWAY_" + "".join(c if c.isalnum() else "_" for c in name).upper()
        wanted |= {f"{stem}_{path}".upper() for path in _paths(SPECS[entry["kind"]])}
    assert reading.variables == wanted


def _paths(model: type[BaseModel]) -> list[str]:
    paths = []
    for name, field in model.model_fields.items():
        annotation: Any = field.annotation
        if name != "id":
            paths.append(name)
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            paths += [f"{name}_{inner}" for inner in _paths(annotation)]
    return paths


def test_the_shipped_file_fits_on_a_page() -> None:
    """It is the first that a user opens: variables need no line in it."""
    assert len(SHIPPED.read_text().splitlines()) < 80
    assert "${" not in SHIPPED.read_text()


def test_the_environment_steers_the_shipped_file(tmp_path: Path) -> None:
    """Numbers, booleans, lists and texts all arrive with their types."""
    here = f"path:{tmp_path}"
    catalog = load_catalog(
        SHIPPED,
        {
            "GATEWAY_ALL_MINILM_L6_V2_SOURCE": here,
            "GATEWAY_SMOLLM2_135M_SOURCE": here,
            "GATEWAY_QWEN3_4B_INSTRUCT_ALIASES": "gpt-4.1-mini,gpt-4o-mini",
            "GATEWAY_QWEN3_0_6B_SAMPLING_TEMPERATURE": "0.25",
            "GATEWAY_QWEN3_0_6B_THINKING": "false",
            "GATEWAY_QWEN3_EMBEDDING_4B_MATRYOSHKA": "256, 512",
            "GATEWAY_QWEN3_EMBEDDING_4B_PROMPTS_QUERY": "123",
        },
    )
    assert catalog.resolve("gpt-4.1-mini").spec.id == "qwen3-4b-instruct"
    assert catalog.resolve("gpt-6-luna").spec.id == "smollm2-135m"
    small = catalog.resolve("qwen3-0.6b").spec
    assert isinstance(small, ChatSpec)
    assert (small.sampling.temperature, small.thinking) == (0.25, False)
    large = catalog.resolve("qwen3-embedding-4b").spec
    assert isinstance(large, EmbeddingSpec)
    assert large.matryoshka == (256, 512)
    assert large.prompts == {"query": "123"}
