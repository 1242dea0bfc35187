"""Models of known shapes with random weights, written as folders that mlx-lm reads too.

Weights are drawn by a seed, quantized and written a shard at a time, so an 8B model needs a shard's
memory. Matrices are three times as wide as mlx draws them, and the logits' standard deviation is
about 3 nats, as a trained model's.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import gateway.engine  # noqa: F401  (first: OpenBLAS must be there before mlx)

import mlx.core as mx  # isort: skip
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import _get_classes, quantize_model
from tokenizers import Tokenizer

from benchmarks.checkpoints import VOCABULARY, mark_plain, write_chat_tokenizer

FORMATS: Final = {
    "float32": mx.float32,
    "float16": mx.float16,
    "bfloat16": mx.bfloat16,
    "4bit": mx.bfloat16,  # the type of scales, and of weights that are not quantized
}
GROUP_SIZE, BITS = 64, 4
WIDTH: Final = 3.0
SHARD_BYTES: Final = 1 << 30
SMALL_LEAF: Final = 1 << 20  # larger ones are not looked at for zeros: that would hold them
SMALL_VOCABULARY: Final = 4096
_QWEN3: Final = {
    "model_type": "qwen3",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
_SMALL: Final = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": SMALL_VOCABULARY,
    "max_position_embeddings": 4096,
}


@dataclass(frozen=True, slots=True)
class Shape:
    """An architecture's config, and the changes for its small form.

    `output` is the factor of the weights that make the logits.
    """

    name: str
    config: Mapping[str, Any]
    small: Mapping[str, Any] = field(default_factory=dict)
    output: float = WIDTH

    def config_for(self, *, is_small: bool) -> dict[str, Any]:
        """Return the config.json of the full or the small form."""
        config = dict(self.config)
        if is_small:
            config |= {**_SMALL, **self.small}
        if config["model_type"] == "qwen3_5":  # mlx-lm reads it inside only
            config = {"model_type": "qwen3_5", "text_config": config}
        return {**config, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _qwen3(width: int, inner: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_attention_heads": heads}
    return {**_QWEN3, **sizes, "num_hidden_layers": layers, **more}


_LINEAR: Final = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "model_type": "qwen3_5",
    "full_attention_interval": 4,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 248_320,
    "max_position_embeddings": 262_144,
}
_SMALL_LINEAR: Final = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
_GEMMA3: Final = {
    "model_type": "gemma3_text",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "max_position_embeddings": 32_768,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "vocab_size": 262_144,
}
_SMALL_GEMMA3: Final = {
    "sliding_window": 64,
    "sliding_window_pattern": 3,
    "num_hidden_layers": 6,
    "query_pre_attn_scalar": 64,
}
_EXPERTS: Final = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
_SMALL_EXPERTS: Final = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
_ALL: Final = (
    # https://huggingface.co/Qwen/Qwen3-0.6B/blob/main/config.json
    Shape("qwen3-0.6b", _qwen3(1024, 3072, 28, 16)),
    # https://huggingface.co/Qwen/Qwen3-4B/blob/main/config.json
    Shape("qwen3-4b", _qwen3(2560, 9728, 36, 32)),
    # https://huggingface.co/Qwen/Qwen3-8B/blob/main/config.json
    Shape("qwen3-8b", _qwen3(4096, 12_288, 36, 32, tie_word_embeddings=False)),
    # https://huggingface.co/Qwen/Qwen3.5-4B/blob/main/config.json (text_config): three layers of
    # four are linear attention
    Shape("hybrid", _qwen3(2560, 9216, 32, 16, **_LINEAR), _SMALL_LINEAR),
    # https://huggingface.co/google/gemma-3-1b-it/blob/main/config.json: of six layers five have a
    # window of 512 tokens. Its last norm multiplies by 1 + 1.
    Shape("sliding", _GEMMA3, _SMALL_GEMMA3, output=WIDTH / 2),
    # https://huggingface.co/Qwen/Qwen3-30B-A3B/blob/main/config.json: 12 of its 48 layers
    Shape("moe", _qwen3(2048, 6144, 12, 32, **_EXPERTS), _SMALL_EXPERTS),
)
SHAPES: Final = {shape.name: shape for shape in _ALL}
# This is as deep as Qwen3 0.6B, with next to no work for a device: the rest is the host's.
NARROW: Final = Shape(
    "28 layers of 64",
    SHAPES["qwen3-0.6b"].config,
    {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 28},
)


def folder_of(shape: Shape, form: str, models: Path, *, is_small: bool) -> Path:
    """Return the folder of a model in this format; write it unless it is there."""
    size = "small" if is_small else "full"
    folder = models / f"{shape.name.replace(' ', '-')}-{size}-{form}"
    if not (folder / "config.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(_tokenizer_folder(models, size), folder)
        config = shape.config_for(is_small=is_small)
        _write_model(folder, config, form, shape.output)
    return folder


def load_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def _tokenizer_folder(models: Path, size: str) -> Path:
    """Train the tokenizer once for all models of a size."""
    folder = models / f"tokenizer-{size}"
    if not (folder / "chat_template.jinja").exists():
        shutil.rmtree(folder, ignore_errors=True)
        write_chat_tokenizer(folder, SMALL_VOCABULARY if size == "small" else VOCABULARY)
    return folder


def _write_model(folder: Path, config: dict[str, Any], form: str, output: float) -> None:
    """Draw, quantize and write the weights, and at last config.json: a folder with it is whole."""
    mx.random.seed(0)
    classes: Any = _get_classes(dict(config))
    model = classes[0](classes[1].from_dict(dict(config)))
    named = dict(_draw(model, mark_plain(load_tokenizer(folder)), FORMATS[form], output))
    model.update(tree_unflatten(list(named.items())))
    del named
    if form == "4bit":
        model, config = quantize_model(model, config, GROUP_SIZE, BITS)
    weights: Any = tree_flatten(model.parameters())
    del model  # each shard is freed once it is written
    places = _write_shards(folder, weights)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    dtype = str(FORMATS[form]).removeprefix("mlx.core.")
    text = json.dumps({**config, "torch_dtype": dtype}, indent=1)
    (folder / "config.json").write_text(text, encoding="utf-8")


def _draw(
    model: Any, plain: mx.array, dtype: mx.Dtype, output: float
) -> Iterator[tuple[str, mx.array]]:
    """Yield a model's weights, drawn but not evaluated.

    Only plain words have logits other than 0, so no answer ends by itself. Weights that a class
    begins with zeros are drawn too: otherwise nothing that a state holds would reach the logits.
    """
    named: Any = tree_flatten(model.parameters())
    heads = [path for path, _ in named if path.endswith("lm_head.weight")]
    heads = heads or [path for path, _ in named if path.endswith("embed_tokens.weight")]
    for path, array in named:
        if not mx.issubdtype(array.dtype, mx.floating):
            yield path, array
            continue
        if path in heads:
            # mlx draws the rows of a Linear from a uniform distribution: narrower by the root of 3
            factor = output if "embed_tokens" in path else output * 3**0.5
            mark = mx.pad(plain, (0, array.shape[0] - plain.shape[0]))[:, None]
            array = factor * mark * array
        elif array.size < SMALL_LEAF and not mx.any(array != 0).item():
            array = 0.2 * mx.random.normal(array.shape)
        elif array.ndim > 1:
            array = WIDTH * array
        yield path, array.astype(dtype)


def _write_shards(folder: Path, weights: list[tuple[str, mx.array]]) -> dict[str, str]:
    """Write the weights in shards, and drop each; return the file of each name."""
    places: dict[str, str] = {}
    shard: dict[str, mx.array] = {}
    weights.reverse()
    while weights:
        path, array = weights.pop()
        shard[path] = array
        nbytes = sum(part.nbytes for part in shard.values())
        if nbytes >= SHARD_BYTES or not weights:
            name = f"model-{len(set(places.values())):05}.safetensors"
            mx.eval(shard)
            mx.save_safetensors(str(folder / name), shard, metadata={"format": "mlx"})
            places |= dict.fromkeys(shard, name)
            shard = {}
            mx.clear_cache()
    return places
