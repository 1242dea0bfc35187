from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.loading import load_embedding
from gateway.engine.device import Device
from gateway.engine.embedding.engine import EmbeddingEngine
from gateway.errors import ModelLoadFailed
from tests.engine.embedding.harness import GOLDEN, read_weights, rewrite, tiny, write_weights

ROWS = [list(range(5, 90)), [2, 9, 3]]


def load(folder: Path) -> EmbeddingEngine:
    return load_embedding(folder, name="tiny", device=Device.CPU)


def test_the_config_and_weights_of_gtes_own_code_are_read_alike(tmp_path: Path) -> None:
    """Its `ntk` is a larger theta and a little linear scaling, with which the vectors were made."""
    folder = tiny(tmp_path, "gte")
    rewrite(
        folder / "config.json",
        model_type="new",
        position_embedding_type="rope",
        rope_parameters=None,
        rope_theta=20_000,
        rope_scaling={"type": "ntk", "factor": 4.0},
    )
    write_weights(folder, {f"new.{name}": a for name, a in read_weights(folder).items()})
    assert np.abs(load(folder).embed(ROWS) - load(GOLDEN / "gte").embed(ROWS)).max() < 1e-6


def test_the_config_of_nomics_own_code_is_read_alike(tmp_path: Path) -> None:
    folder = tiny(tmp_path, "nomic-bert")
    former: dict[str, Any] = {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_inner": 64,
        "n_positions": 128,
    }
    former |= {"layer_norm_epsilon": 1e-12, "activation_function": "swiglu"}
    keys = ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"]
    keys += ["max_position_embeddings", "layer_norm_eps", "hidden_act", "rope_parameters"]
    rewrite(folder / "config.json", **dict.fromkeys(keys), **former, rotary_emb_base=1000)
    assert np.array_equal(load(folder).embed(ROWS), load(GOLDEN / "nomic-bert").embed(ROWS))


@pytest.mark.parametrize("name", ["nomic-bert", "jina-v3"])
def test_a_config_without_rotations_has_those_of_its_family(tmp_path: Path, name: str) -> None:
    folder = tiny(tmp_path, name)
    rewrite(folder / "config.json", rope_parameters=None)
    assert np.array_equal(load(folder).embed(ROWS), load(GOLDEN / name).embed(ROWS))


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("nomic-bert", {"num_experts": 8}, "num_experts 8"),
        ("nomic-bert", {"rotary_scaling_factor": 2}, "rotary_scaling_factor"),
        ("nomic-bert", {"prenorm": True}, "prenorm"),
        ("nomic-bert", {"is_causal": True}, "is_causal"),
        ("nomic-bert", {"pad_token_id": 10_000_000}, "pad_token_id"),
        ("nomic-bert", {"num_hidden_layers": 10_000_000}, "num_hidden_layers"),
        ("modernbert", {"num_hidden_layers": 10_000_000, "layer_types": None}, "num_hidden_layers"),
        ("gte", {"max_position_embeddings": 10_000_000}, "max_position_embeddings"),
        ("gte", {"hidden_size": float("inf")}, "hidden_size is inf"),
        ("gte", {"rope_parameters": {"rope_theta": float("nan")}}, "not a positive"),
        ("gte", {"rope_parameters": {"rope_type": "linear", "factor": -1}}, "not a positive"),
        ("nomic-bert", {"num_attention_heads": 32}, "is not even"),
        ("nomic-bert", {"num_hidden_layers": 1}, r"unknown: encoder\.layer\.1"),
        ("gte", {"rope_parameters": {"rope_type": "yarn"}}, "yarn"),
        ("gte", {"rope_parameters": {"rope_type": "linear"}}, "factor"),
        ("gte", {"type_vocab_size": 1}, "missing: embeddings.token_type"),
        ("jina-v3", {"model_type": "gte"}, r"missing: .*intermediate\.gate"),
        # The repository whose code is its own, with its adapters inside the weights.
        ("jina-v3", {"model_type": "xlm-roberta", "position_embedding_type": "rotary"}, "rotary"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    tmp_path: Path, name: str, changes: dict[str, Any], named: str
) -> None:
    folder = tiny(tmp_path, name)
    rewrite(folder / "config.json", **changes)
    with pytest.raises(ModelLoadFailed, match=named):
        load(folder)
