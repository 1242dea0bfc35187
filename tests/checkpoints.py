"""Tiny chat models with random weights, written where a test wants them."""

import json
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

from gateway.engine.models import gemma4_assistant
from gateway.engine.models.checkpoint import Checkpoint
from gateway.engine.models.mtp_head import MtpHead

DEMO = Path(__file__).parents[1] / "demo" / "chat"
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
# A layer of each kind is enough for what cannot mix layers up: a step's time is that of its layers.
# The first layer looks at a window of 96 tokens only.
SLIDING: dict[str, Any] = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 96,
    "sliding_window_pattern": 2,
}
# The second layer keeps a state and no KV.
STATEFUL: dict[str, Any] = {
    "model_type": "lfm2",
    "num_hidden_layers": 2,
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 64,
    "block_ff_dim": 96,
    "block_multiple_of": 1,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "full_attn_idxs": [0],
}
# The first layer is linear attention.
HYBRID: dict[str, Any] = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 32,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
}
# The first of two layers is linear attention, as in Qwen3.5, whose MTP head `add_head` writes.
HEADED: dict[str, Any] = {
    **{key: each for key, each in HYBRID.items() if not key.startswith("linear_conv")},
    "model_type": "qwen3_5_text",
    "linear_conv_kernel_dim": 4,
    "num_experts": 0,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
}
# Layer 0 has a window, and layers 2 and 3 read the KV of layers 0 and 1.
GEMMA4: dict[str, Any] = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "sliding_window": 48,
    "head_dim": 16,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "use_double_wide_mlp": False,
}
# A plain decoder, whose head `add_head` writes as a layer after the last.
AFTER_LAST: dict[str, Any] = {
    "model_type": "qwen3",
    "head_dim": 16,
    "num_nextn_predict_layers": 1,
}
# What the modules of a head are called there.
LATER_NAMES: dict[str, str] = {
    "pre_fc_norm_embedding.": "enorm.",
    "pre_fc_norm_hidden.": "hnorm.",
    "fc.": "eh_proj.",
    "norm.": "shared_head.norm.",
    "layers.0.": "",
}
# No rotary positions: no logits depend on how much each row has read.
ABSOLUTE: dict[str, Any] = {
    "model_type": "gpt2",
    "n_ctx": 4096,
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 4096,
    "layer_norm_epsilon": 1e-5,
}


def teach_thinking(folder: Path, *, opens: bool) -> Path:
    """Add <think> and </think> to a checkpoint's tokens; a template that `opens` begins one."""
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    first = json.loads((folder / "config.json").read_text())["vocab_size"] - 2
    tokenizer["added_tokens"] += [
        {"id": first + i, "content": mark, "special": False, **plain}
        for i, mark in enumerate(("<think>", "</think>"))
    ]
    file.write_text(json.dumps(tokenizer))
    template = folder / "chat_template.jinja"
    ending = (
        "{% if enable_thinking is false %}<think>\n\n</think>\n\n"
        + ("{% else %}<think>\n" if opens else "")
        + "{% endif %}"
    )
    template.write_text(template.read_text() + ending)
    return folder


def write_chat(folder: Path, seed: int = 0, **config: Any) -> Path:
    """Write a llama with random weights and demo-chat's tokenizer, template and ids."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO / file, folder)
    demo = json.loads((DEMO / "config.json").read_text())
    ids = {key: demo[key] for key in ("eos_token_id", "bos_token_id", "vocab_size") if key in demo}
    whole = {**LLAMA, **ids, **config}
    (folder / "config.json").write_text(json.dumps(whole))
    mx.random.seed(seed)
    model = make_model(whole)
    # Wide weights, so that the likeliest token is likeliest by far and depends on its past.
    named: Any = tree_flatten(model.parameters())
    weights = {name: array * (1 if array.ndim == 1 else 3) for name, array in named}
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def make_model(config: dict[str, Any]) -> Any:
    """Return mlx-lm's model with random weights."""
    kind = config["model_type"]
    if kind.startswith("qwen3_5"):  # mlx-lm knows these by their outer name
        kind = kind.removesuffix("_text")
    classes: Any = _get_classes({**config, "model_type": kind})
    return classes[0](classes[1].from_dict(config))


def add_head(folder: Path, seed: int = 7, *, is_right: bool = False) -> Path:
    """Add an MTP head with random weights to a model, as converters store it: `mtp.*` for Qwen3.5's
    kind, a layer after the last for others.

    If it `is_right`, most guesses are: the model's layers and the head's are made to add little to
    a token's embedding, which the head passes on.
    """
    whole = json.loads((folder / "config.json").read_text())
    config = whole.get("text_config", whole)
    mx.random.seed(seed)
    model = make_model(config)
    head: Any = MtpHead(getattr(model, "language_model", model))
    named: Any = tree_flatten(head.parameters())
    file = folder / "model.safetensors"
    weights: Any = mx.load(str(file))
    weights = dict(weights)
    for name, array in named:
        weights[_stored(name, config)] = array * (3 if array.ndim > 1 else 1)
    if is_right:
        width = config["hidden_size"]
        passed = mx.concatenate([mx.eye(width), mx.zeros((width, width))], axis=1)
        weights[_stored("fc.weight", config)] = passed
        for name in weights:
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                weights[name] = weights[name] * 0.005
    mx.save_safetensors(str(file), weights)
    return folder


def write_assistant(
    folder: Path, target: Path, seed: int = 9, *, is_right: bool = False, **config: Any
) -> Path:
    """Write a drafter of Gemma 4 with random weights, and its target's tokenizer.

    If it `is_right`, most guesses are: the target's layers and the drafter's are made to add little
    to a token's embedding, of which the drafter makes the target's logits.
    """
    text = json.loads((target / "config.json").read_text())
    text = text.get("text_config", text)
    width = text["hidden_size"]
    text |= {"hidden_size": width if is_right else 32, "num_hidden_layers": 2}
    text |= {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 2}
    text |= {"tie_word_embeddings": True, "vocab_size_per_layer_input": 0}
    text |= {key: config.pop(key) for key in text.keys() & config.keys()}
    whole = {
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": width,
        "text_config": text,
        "num_centroids": next(n for n in (8, 7, 5, 4, 3, 2, 1) if text["vocab_size"] % n == 0),
        "centroid_intermediate_top_k": 1,
        **config,
    }
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(target / name, folder)
    (folder / "config.json").write_text(json.dumps(whole))
    mx.random.seed(seed)
    arguments: Any = gemma4_assistant.ModelArgs
    model: Any = gemma4_assistant.Model(arguments.from_dict(whole))
    named: Any = tree_flatten(model.parameters())
    weights = {name: array * (3 if array.ndim > 1 else 1) for name, array in named}
    if whole.get("use_ordered_embeddings"):
        order = mx.random.permutation(text["vocab_size"])
        weights["masked_embedding.token_ordering"] = order.astype(mx.int32)
    if is_right:
        file = target / "model.safetensors"
        targets: Any = dict(mx.load(str(file)))  # type: ignore[arg-type]  # it has no metadata
        passed = mx.concatenate([mx.eye(width), mx.zeros((width, width))], axis=1)
        weights["pre_projection.weight"] = passed
        weights["model.embed_tokens.weight"] = targets["lm_head.weight"]
        for each in (weights, targets):
            small = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")
            each |= {name: each[name] * 0.005 for name in each if name.endswith(small)}
        mx.save_safetensors(str(file), targets)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def _stored(name: str, config: dict[str, Any]) -> str:
    """Return what a head's array is called in a file."""
    if config["model_type"].startswith("qwen3_5"):
        return f"language_model.mtp.{name}"
    start = next(start for start in LATER_NAMES if name.startswith(start))
    place = config["num_hidden_layers"]
    return f"model.layers.{place}.{LATER_NAMES[start]}{name.removeprefix(start)}"


def write_reciting(
    folder: Path, pieces: Sequence[str], *, opening: str = "", response_template: Any = None
) -> Path:
    """Write a model that answers everything with these pieces, each a token of its own; those in
    `<|…|>` are special, and so is `opening`, with which its template opens the answer.
    """
    added = [*pieces, *([opening] if opening else [])]
    write_chat(folder, num_hidden_layers=1, vocab_size=1026 + len(added))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer["added_tokens"] += [
        {"id": 1026 + i, "content": piece, "special": piece.startswith("<|"), **plain}
        for i, piece in enumerate(added)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["response_template"] = response_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    asking = f"{{% if add_generation_prompt %}}<|assistant|>{opening}{{% endif %}}"
    messages = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(messages + asking)
    # Its layers add nothing, so that each token alone decides on the next one.
    file = folder / "model.safetensors"
    weights: Any = mx.load(str(file))
    weights = {name: array * ("norm" in name) for name, array in weights.items()}
    ids = {each["content"]: each["id"] for each in tokenizer["added_tokens"]}
    said = [opening or "<|assistant|>", *pieces, "<|end|>"]
    for place, (piece, following) in enumerate(pairwise(said)):
        weights["model.embed_tokens.weight"][ids[piece], place] = 1
        weights["lm_head.weight"][ids[following], place] = 9
    mx.save_safetensors(str(file), weights)
    return folder


def write_adapter(
    folder: Path, base: Path, *, seed: int = 1, rank: int = 4, scale: float = 2.0, only: str = ""
) -> Path:
    """Write an adapter with random weights, as mlx-lm's trainer does, of a base's projections whose
    names have `only`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parameters = {"rank": rank, "scale": scale, "dropout": 0.0}
    config = {"fine_tune_type": "lora", "num_layers": -1, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    mx.random.seed(seed)
    weights = {}
    for name, weight in sorted(_projections(base).items()):
        rows, columns = weight.shape
        module = name.removesuffix(".weight")
        if only in module:
            weights[f"{module}.lora_a"] = mx.random.normal((columns, rank)) * 0.3
            weights[f"{module}.lora_b"] = mx.random.normal((rank, rows)) * 0.1
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    return folder


def merge_adapter(folder: Path, base: Path, adapter: Path) -> Path:
    """Write the model that a base and an adapter are together: each weight with its product."""
    shutil.copytree(base, folder)
    parameters = json.loads((adapter / "adapter_config.json").read_text())["lora_parameters"]
    weights: Any = mx.load(str(base / "model.safetensors"))
    factors: Any = mx.load(str(adapter / "adapters.safetensors"))
    for name in [name for name in factors if name.endswith(".lora_a")]:
        module = name.removesuffix(".lora_a")
        product = factors[name] @ factors[f"{module}.lora_b"]
        weights[f"{module}.weight"] = weights[f"{module}.weight"] + parameters["scale"] * product.T
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def _projections(base: Path) -> dict[str, mx.array]:
    """Return a model's projections, without its head's."""
    weights: Any = mx.load(str(base / "model.safetensors"))
    own = Checkpoint("base", base).tensors()
    return {
        name: each
        for name, each in weights.items()
        if name.endswith("_proj.weight") and name in own
    }
