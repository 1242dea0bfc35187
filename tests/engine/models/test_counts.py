"""Numbers of config.json that something is sized by are bounded, and all that models have fits."""

import dataclasses
import importlib
import json
import pkgutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models
import pytest
from mlx.nn.layers.activations import ReLU
from mlx.utils import tree_flatten

from benchmarks.tiny_models import names, tiny_config, tiny_model
from gateway.engine.device import Device
from gateway.engine.models.checkpoint import Checkpoint
from gateway.engine.models.counts import bound_of, bounding_modules, check_counts, check_depth
from gateway.engine.models.decoders import open_decoder
from gateway.errors import ModelLoadFailed
from tests.checkpoints import write_chat

# Numbers of mlx-lm's classes that nothing is sized by: places, ratios, periods, ids.
PLACES = {
    *("altup_active_idx", "attn_layer_offset", "attn_layer_period", "attn_temperature_tuning"),
    *("block_multiple_of", "blocksparse_num_local_blocks", "blocksparse_vert_stride"),
    *("candidate_source_layer_id", "candidate_topk_blocks", "compress_ratios"),
    *("decoder_sparse_step", "dense_attention_every_n_layers", "dim_model_base"),
    *("engram_layer_ids", "expert_layer_offset", "expert_layer_period", "ffn_dim_divisor"),
    *("first_k_dense_replace", "floor_scale", "full_attention_idx", "full_attention_interval"),
    *("full_attn_idxs", "hybrid_layer_pattern", "image_token_id", "index_source_layer_ids"),
    *("index_local_blocks", "interleave_moe_layer_step", "kv_channels", "kv_source_layer_ids"),
    *("mlp_only_layers", "moe_layer_end_index", "moe_layer_freq", "moe_layer_interval"),
    *("moe_layer_start_index", "no_rope_layer_interval", "no_rope_layers", "pad_token_id"),
    *("partial_rotary_factor", "patch_temporal", "pos_emb_height", "rope_parameters"),
    *("rope_theta", "rotary_emb_base", "schema_version", "sparse_attention_freq"),
}


def write(folder: Path, config: dict[str, Any]) -> Checkpoint:
    """Write a checkpoint with random weights."""
    weights: Any = dict(tree_flatten(tiny_model(config).parameters()))
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return Checkpoint("mine", folder)


def load(checkpoint: Checkpoint) -> Any:
    return open_decoder(checkpoint, device=Device.CPU, dtype=None)[0]


@pytest.mark.parametrize(
    ("key", "number"),
    [
        ("num_hidden_layers", 1001),
        ("n_layer", 10**9),
        ("num_loops", 10**9),
        ("hc_sinkhorn_iters", 10**9),
        ("altup_num_inputs", 10**9),
        ("num_experts", 10**6),
        ("num_attention_heads", -1),
        ("head_dim", 1e308),
        ("vocab_size", float("nan")),
        ("hidden_size", float("inf")),
        ("max_position_embeddings", -5),
        ("max_position_embeddings", 2**31),
        ("sliding_window", -2),
        ("intermediate_size", [64, -1]),
    ],
)
@pytest.mark.parametrize("is_nested", [False, True])
def test_a_number_beyond_its_bounds_is_refused_by_name(
    key: str, number: Any, is_nested: bool
) -> None:
    config: dict[str, Any] = {"model_type": "llama", key: number}
    with pytest.raises(ValueError, match=f"^{key} is "):
        check_counts({"text_config": config} if is_nested else config)


def test_numbers_that_real_models_have_are_let_through() -> None:
    """The largest of each that a published model states."""
    check_counts(
        {
            "num_hidden_layers": 126,  # Llama 3.1 405B
            "n_routed_experts": 896,
            "vocab_size": 901_629,  # XLM-V
            "max_position_embeddings": 10_485_760,  # Llama 4 Scout
            "rope_theta": 100_000_000_000,  # Falcon-H1
            "sliding_window": -1,
            "pad_token_id": -1,
            "vision_feature_layer": -2,
            "image_token_index": -200,
            "num_key_value_heads": None,
            "tie_word_embeddings": True,
            "layer_types": ["full_attention"],
            "sliding_window_pattern": "LLLG",
            "num_parameters": 8_030_261_248,
        }
    )


@pytest.mark.slow
def test_every_number_of_mlx_lms_classes_has_a_bound_or_sizes_nothing() -> None:
    """A new version may bring names that no bound fits."""
    unknown = set()
    for name in names():
        try:
            module = importlib.import_module(f"mlx_lm.models.{name}")
        except SystemExit:  # it wants a package of its own
            continue
        for kind in vars(module).values():
            if isinstance(kind, type) and dataclasses.is_dataclass(kind):
                whole = {each.name for each in dataclasses.fields(kind) if "int" in str(each.type)}
                unknown |= {each for each in whole - PLACES if bound_of(each) is None}
    assert not unknown
    assert len(list(pkgutil.iter_modules(mlx_lm.models.__path__))) > 100


@pytest.mark.slow
def test_every_architecture_of_mlx_lm_opens_within_the_bounds(tmp_path: Path) -> None:
    opened = 0
    for name in names():
        try:
            checkpoint = write(tmp_path / name, tiny_config(name))
        except (SystemExit, ValueError):  # it wants a package, or what a tiny config lacks
            continue
        load(checkpoint)
        opened += 1
    assert opened > 100


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3_moe", {}),  # experts that are one array
        ("gemma3", {}),  # a tower that the class drops
        ("llama", {"tie_word_embeddings": True}),  # a head that the file lacks
        ("gemma4_text", {"num_kv_shared_layers": 2}),  # layers without keys and values
        ("afm7", {}),  # layers under two names
    ],
)
def test_arrays_that_files_may_lack_are_no_missing_layers(
    tmp_path: Path, name: str, changes: dict[str, Any]
) -> None:
    checkpoint = write(tmp_path, {**tiny_config(name), **changes})
    if name == "gemma3":
        weights: Any = mx.load(str(tmp_path / "model.safetensors"))
        tower = {f"vision_tower.layers.{i}.weight": mx.zeros((2, 2)) for i in range(40)}
        mx.save_safetensors(str(tmp_path / "model.safetensors"), {**weights, **tower})
    load(checkpoint)


@pytest.mark.parametrize(
    ("name", "key"), [("llama", "num_hidden_layers"), ("gpt2", "n_layer"), ("dbrx", "n_layers")]
)
def test_more_layers_than_the_files_have_are_refused_before_they_are_made(
    tmp_path: Path, name: str, key: str
) -> None:
    config = tiny_config(name)
    checkpoint = write(tmp_path, config)
    (tmp_path / "config.json").write_text(json.dumps({**config, key: 900}))
    with pytest.raises(ModelLoadFailed, match=f"{key} is 900, but the weights are those of 4 "):
        load(checkpoint)


@dataclasses.dataclass
class Arguments:
    """Arguments of a class with layers."""

    num_hidden_layers: int = 0


def test_a_layer_may_have_no_arrays() -> None:
    """One whose attention and MLP do nothing has none; the highest number counts."""
    names = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1, 3)]
    check_depth({"num_hidden_layers": 4}, Arguments, names)
    with pytest.raises(ValueError, match="num_hidden_layers is 5, but the weights are those of 4"):
        check_depth({"num_hidden_layers": 5}, Arguments, names)


def test_a_model_of_many_more_modules_than_weights_is_refused() -> None:
    """Each of its numbers may be within bounds, and their product is not."""
    module: Any = ReLU
    with bounding_modules(arrays=2):
        [module() for _ in range(1100)]
        with pytest.raises(ValueError, match="over 1,100 modules, but has only 2 weights"):
            module()
    [module() for _ in range(2000)]  # nobody counts these


def test_a_class_that_wants_a_package_of_its_own_ends_nothing(tmp_path: Path) -> None:
    """Its module calls sys.exit."""
    write_chat(tmp_path, num_hidden_layers=1)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "olmo"}))
    with pytest.raises(ModelLoadFailed, match="needs a package that is not installed"):
        load(Checkpoint("mine", tmp_path))


@pytest.mark.parametrize(
    ("array", "why"),
    [
        ({"shape": [-1, -1]}, "an array of shape"),
        ({"shape": ["x"]}, "an array of shape"),
        ({"shape": [1.5]}, "an array of shape"),
        ({"shape": [True]}, "an array of shape"),
        ({"data_offsets": [64, 0]}, "at bytes 64 to 0"),
        ({"data_offsets": [-64, 64]}, "at bytes -64"),
    ],
)
def test_numbers_of_a_header_are_counts(tmp_path: Path, array: dict[str, Any], why: str) -> None:
    """A negative size would give memory to the budget."""
    header = {"w": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64], **array}}
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(
        len(text).to_bytes(8, "little") + text + bytes(128)
    )
    with pytest.raises(ModelLoadFailed, match=why):
        Checkpoint("mine", tmp_path).tensors()
