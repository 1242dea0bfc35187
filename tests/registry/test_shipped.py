"""The models.yaml that is shipped."""

from pathlib import Path

import yaml

from gateway.registry import ChatSpec, EmbeddingSpec, RerankSpec, load_catalog

SHIPPED = Path(__file__).parents[2] / "models.yaml"


def test_the_shipped_file_is_valid(tmp_path: Path) -> None:
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


def test_the_shipped_file_fits_on_a_page() -> None:
    assert len(SHIPPED.read_text().splitlines()) < 130
    assert "${" not in SHIPPED.read_text()
