"""Limits of inputs by files: the limit of the engine that they become, or none."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.loading import load_embedding
from gateway.engine import inputs
from gateway.engine.device import Device
from gateway.engine.hub import Hub
from gateway.engine.inputs import read_inputs
from gateway.engine.models.notes import verified_by
from gateway.errors import ModelLoadFailed
from gateway.registry import ChatSpec, EmbeddingSpec, Inputs, ModelSpec, PathSource, RerankSpec
from tests.engine.embedding.harness import rewrite, tiny

NO_HUB = Hub(endpoint="http://127.0.0.1:9")
COUNTS = st.one_of(st.none(), st.integers(-3, 70), st.sampled_from([0, True, 1e30, "12", 10**12]))
FLAGS = st.sampled_from([None, True, False])
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=9,
)
KEYS = st.sampled_from(
    [
        *("max_position_embeddings", "text_config", "model_type", "sliding_window", "layer_types"),
        *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "pad_token_id"),
    ]
)
EMBED: dict[str, Any] = {"id": "m", "kind": "embedding", "pooling": "mean", "normalize": True}
BERT = {"model_type": "bert"}
RANK: dict[str, Any] = {"id": "m", "kind": "rerank"}


def limit_of_engine(folder: Path, max_context: int | None) -> int | None:
    """Load a model and give its limit; None if it cannot be loaded."""
    try:
        engine = load_embedding(folder, name="m", device=Device.CPU, max_context=max_context)
    except ModelLoadFailed:
        return None
    limit = engine.max_tokens
    engine.close()
    return limit


@pytest.mark.generator(weight=0.5)
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    positions=COUNTS,
    window=st.tuples(FLAGS, COUNTS),
    texts=st.tuples(COUNTS, COUNTS),
    max_context=st.one_of(st.none(), st.integers(8, 99)),
)
@pytest.mark.parametrize("name", ["gte", "modernbert", "qwen3", "roberta"])
def test_the_limit_by_files_is_the_one_of_the_engine(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    positions: Any,
    window: tuple[bool | None, Any],
    texts: tuple[Any, Any],
    max_context: int | None,
) -> None:
    """This holds for all limits that files state, if they can be loaded at all."""
    folder = tiny(tmp_path_factory.mktemp("m"), name)
    config: dict[str, Any] = {}
    if name != "roberta":  # it has a weight for each position
        config["max_position_embeddings"] = positions
    if name == "qwen3":
        config |= {"use_sliding_window": window[0], "sliding_window": window[1]}
    rewrite(folder / "config.json", **config)
    rewrite(folder / "sentence_bert_config.json", max_seq_length=texts[0])
    rewrite(folder / "tokenizer_config.json", model_max_length=texts[1])
    limit = limit_of_engine(folder, max_context)
    spec = EmbeddingSpec(
        id="m", kind="embedding", source=PathSource(folder), max_context=max_context
    )
    found = read_inputs(spec, NO_HUB)
    assert found is not None
    if limit is not None:
        assert found.max_tokens == limit


@pytest.mark.generator(weight=0.5)
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.one_of(JSON, st.dictionaries(KEYS, JSON)), kind=st.integers(0, 3))
def test_no_config_is_more_than_an_unknown_limit(tmp_path: Path, content: Any, kind: int) -> None:
    """Nothing that a file says keeps other models from being listed."""
    source = PathSource(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(content))
    specs: list[ModelSpec] = [
        ChatSpec(id="m", kind="chat", source=source),
        EmbeddingSpec(**EMBED, source=source),
        RerankSpec(**RANK, source=source),
        RerankSpec(
            **RANK, source=source, scoring="labels", labels=("y", "n"), template="{query}{document}"
        ),
    ]
    found = read_inputs(specs[kind], NO_HUB)
    assert found is not None
    assert found.max_tokens is None or type(found.max_tokens) is int


@pytest.mark.parametrize("content", ["[" * 100_000, '{"max_position_embeddings": 1e999}', "\0"])
def test_a_config_that_no_parser_takes_leaves_the_limit_unknown(
    tmp_path: Path, content: str
) -> None:
    (tmp_path / "config.json").write_text(content)
    spec = ChatSpec(id="m", kind="chat", source=PathSource(tmp_path))
    assert read_inputs(spec, NO_HUB) == Inputs(None)


def test_files_that_have_not_changed_are_not_read_again(tmp_path: Path) -> None:
    folder = tiny(tmp_path, "bert")
    spec = EmbeddingSpec(id="m", kind="embedding", source=PathSource(folder))
    first = read_inputs(spec, NO_HUB)
    before = inputs._read.cache_info()
    assert read_inputs(spec, NO_HUB) == first == Inputs(48, verified=verified_by(BERT))
    after = inputs._read.cache_info()
    assert (after.misses, after.hits) == (before.misses, before.hits + 1)
    rewrite(folder / "sentence_bert_config.json", max_seq_length=20)
    assert read_inputs(spec, NO_HUB) == Inputs(20, verified=verified_by(BERT))
