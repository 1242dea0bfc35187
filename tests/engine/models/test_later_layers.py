"""The layer after a model's last guesses as a plain reading of its description does."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from gateway.engine.kv.layers import batch_of_one, make_batch_caches
from gateway.engine.models.checkpoint import Checkpoint
from gateway.engine.models.head_names import head_tensors
from gateway.errors import ModelLoadFailed
from tests.checkpoints import AFTER_LAST, add_head, write_chat
from tests.engine.models.plain_heads import (
    TOKENS,
    Array,
    angles_of,
    attend,
    check_guesses,
    guess_twice,
    load,
    pack_head,
    turn_halves,
)

MIXTURE: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}
LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**MIXTURE, **LATENT, "n_group": 2, "topk_group": 1},
    "glm4_moe": {
        **MIXTURE,
        "n_group": 1,
        "topk_group": 1,
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": True,
        "attention_bias": True,
        "rope_scaling": None,
    },
    "glm4_moe_lite": {**MIXTURE, **LATENT, "n_group": 1, "topk_group": 1, "attention_bias": False},
    "qwen3": AFTER_LAST,
    "mimo": {"num_nextn_predict_layers": 1},
}
GATED = ("gate_proj", "up_proj", "down_proj")


def shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the arrays that the publishers' files have of the head."""
    kind, width, inner = config["model_type"], config["hidden_size"], config["intermediate_size"]
    is_mimo = kind == "mimo"
    names = ("token_layernorm", "hidden_layernorm") if is_mimo else ("enorm", "hnorm")
    for name in (*names, "input_layernorm", "post_attention_layernorm"):
        yield name, (width,)
    yield "final_layernorm" if is_mimo else "shared_head.norm", (width,)
    yield "input_proj" if is_mimo else "eh_proj", (width, 2 * width)
    if not is_mimo:
        yield "embed_tokens", (config["vocab_size"], width)
        yield "shared_head.head", (config["vocab_size"], width)
    heads = config["num_attention_heads"]
    if "kv_lora_rank" in config:
        nope, rope, size = (config[f"{n}_head_dim"] for n in ("qk_nope", "qk_rope", "v"))
        latent, small = config["kv_lora_rank"], config["q_lora_rank"]
        yield "self_attn.q_a_proj", (small, width)
        yield "self_attn.q_a_layernorm", (small,)
        yield "self_attn.q_b_proj", (heads * (nope + rope), small)
        yield "self_attn.kv_a_proj_with_mqa", (latent + rope, width)
        yield "self_attn.kv_a_layernorm", (latent,)
        yield "self_attn.kv_b_proj", (heads * (nope + size), latent)
    else:
        size = config.get("head_dim", width // heads)
        for name, count in (("q", heads), ("k", config["num_key_value_heads"])):
            yield f"self_attn.{name}_proj", (count * size, width)
            if not is_mimo:
                yield f"self_attn.{name}_norm", (size,)
        yield "self_attn.v_proj", (config["num_key_value_heads"] * size, width)
    yield "self_attn.o_proj", (width, heads * size)
    feeds = {"mlp": inner}
    if "n_routed_experts" in config:
        small = config["moe_intermediate_size"]
        feeds = {f"mlp.experts.{i}": small for i in range(config["n_routed_experts"])}
        feeds["mlp.shared_experts"] = small
        yield "mlp.gate", (config["n_routed_experts"], width)
    for feed, size in feeds.items():
        for name in GATED:
            yield f"{feed}.{name}", (width, size) if name == "down_proj" else (size, width)


def write(folder: Path, kind: str, **more: Any) -> tuple[Path, dict[str, Array]]:
    """Write a model with a head as its publisher stores it; return the head's arrays too."""
    write_chat(folder, **{"model_type": kind, **CONFIGS[kind], **more})
    config = json.loads((folder / "config.json").read_text())
    chance = np.random.default_rng(3)
    head = {}
    for name, shape in shapes(config):
        scale = 1.0 if len(shape) == 1 else 2 / np.sqrt(shape[1])
        center = 1.0 if len(shape) == 1 else 0.0
        head[f"{name}.weight"] = center + scale * 0.5 * chance.standard_normal(shape)
    if kind in ("glm4_moe", "mimo"):
        for name in "qkv":
            bias = chance.standard_normal(len(head[f"self_attn.{name}_proj.weight"]))
            head[f"self_attn.{name}_proj.bias"] = bias
    if "n_routed_experts" in config:
        bias = 0.3 * chance.standard_normal(config["n_routed_experts"])
        head["mlp.gate.e_score_correction_bias"] = bias
    start = "model.mtp_layers.0." if kind == "mimo" else "model.layers.2."
    file = folder / "model.safetensors"
    weights: Any = mx.load(str(file))
    added = {f"{start}{name}": mx.array(each.astype(np.float32)) for name, each in head.items()}
    mx.save_safetensors(str(file), {**dict(weights), **added})
    return folder, head


class Plain:
    """The head in numpy: all pairs at once, no KV."""

    def __init__(self, folder: Path, head: dict[str, Array]) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        loaded: Any = mx.load(str(folder / "model.safetensors"))
        self.embeddings = np.array(loaded["model.embed_tokens.weight"], np.float64)
        self.output = np.array(loaded["lm_head.weight"], np.float64)
        self.weights = head
        self.is_mimo = self.config["model_type"] == "mimo"

    def guess(self, hidden: Array, tokens: Array) -> Array:
        """Return the states after pairs of the tokens and the states before them, (n, width)."""
        if self.is_mimo:
            pair = (
                self._norm(hidden, "hidden_layernorm"),
                self._norm(self.embeddings[tokens], "token_layernorm"),
            )
        else:
            pair = self._norm(self.embeddings[tokens], "enorm"), self._norm(hidden, "hnorm")
        joined = np.concatenate(pair, axis=-1)
        x = self._project(joined, "input_proj" if self.is_mimo else "eh_proj")
        x = x + self._attend(self._norm(x, "input_layernorm"))
        x = x + self._feed(self._norm(x, "post_attention_layernorm"))
        return self._norm(x, "final_layernorm") if self.is_mimo else x

    def score(self, states: Array) -> Array:
        return (states if self.is_mimo else self._norm(states, "shared_head.norm")) @ self.output.T

    def _norm(self, x: Array, name: str) -> Array:
        mean = np.mean(x * x, axis=-1, keepdims=True)
        return x / np.sqrt(mean + self.config["rms_norm_eps"]) * self.weights[f"{name}.weight"]

    def _project(self, x: Array, name: str) -> Array:
        return x @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", 0.0)

    def _attend(self, x: Array) -> Array:
        q, k, v = self._latent(x) if "kv_lora_rank" in self.config else self._grouped(x)
        attended = attend(q, k, v).reshape(len(x), -1)
        return self._project(attended, "self_attn.o_proj")

    def _latent(self, x: Array) -> tuple[Array, Array, Array]:
        config, n = self.config, len(x)
        heads, nope = config["num_attention_heads"], config["qk_nope_head_dim"]
        small = self._norm(self._project(x, "self_attn.q_a_proj"), "self_attn.q_a_layernorm")
        q = self._project(small, "self_attn.q_b_proj").reshape(n, heads, -1)
        both = self._project(x, "self_attn.kv_a_proj_with_mqa")
        latent, turning = both[:, : config["kv_lora_rank"]], both[:, config["kv_lora_rank"] :]
        latent = self._norm(latent, "self_attn.kv_a_layernorm")
        kv = self._project(latent, "self_attn.kv_b_proj").reshape(n, heads, -1)
        shared = np.repeat(self._turn_pairs(turning[:, None]), heads, axis=1)
        k = np.concatenate([kv[..., :nope], shared], axis=-1)
        q = np.concatenate([q[..., :nope], self._turn_pairs(q[..., nope:])], axis=-1)
        return q, k, kv[..., nope:]

    def _grouped(self, x: Array) -> tuple[Array, Array, Array]:
        n, heads = len(x), self.config["num_attention_heads"]
        q, k, v = (
            self._project(x, f"self_attn.{name}_proj").reshape(n, count, -1)
            for name, count in (
                ("q", heads),
                *(("kv"[i], self.config["num_key_value_heads"]) for i in (0, 1)),
            )
        )
        if not self.is_mimo:
            q, k = self._norm(q, "self_attn.q_norm"), self._norm(k, "self_attn.k_norm")
        q, k = self._turn_halves(q), self._turn_halves(k)
        return q, *(np.repeat(each, heads // each.shape[1], axis=1) for each in (k, v))

    def _turn_pairs(self, x: Array) -> Array:
        """Rotate each dimension with the next one."""
        angles = angles_of(self.config["rope_theta"], x.shape[-1], len(x))
        turned = np.empty_like(x)
        turned[..., ::2] = x[..., ::2] * np.cos(angles) - x[..., 1::2] * np.sin(angles)
        turned[..., 1::2] = x[..., 1::2] * np.cos(angles) + x[..., ::2] * np.sin(angles)
        return turned

    def _turn_halves(self, x: Array) -> Array:
        dims = int(x.shape[-1] * self.config.get("partial_rotary_factor", 1.0))
        return turn_halves(x, self.config["rope_theta"], dims)

    def _feed(self, x: Array) -> Array:
        config = self.config
        if "n_routed_experts" not in config:
            return self._gated(x, "mlp")
        scores = 1 / (1 + np.exp(-self._project(x, "mlp.gate")))
        fed = self._gated(x, "mlp.shared_experts")
        groups = np.arange(config["n_routed_experts"]).reshape(config["n_group"], -1)
        for row, score in enumerate(scores):
            biased = score + self.weights["mlp.gate.e_score_correction_bias"]
            best = [np.sort(biased[group])[-2:].sum() for group in groups]
            kept = groups[np.argsort(best)[-config["topk_group"] :]].flatten()
            chosen = kept[np.argsort(biased[kept])[-config["num_experts_per_tok"] :]]
            shares = config["routed_scaling_factor"] * score[chosen] / score[chosen].sum()
            for share, expert in zip(shares, chosen, strict=True):
                fed[row] += share * self._gated(x[row], f"mlp.experts.{expert}")
        return fed

    def _gated(self, x: Array, name: str) -> Array:
        opened = self._project(x, f"{name}.gate_proj")
        raised = self._project(x, f"{name}.up_proj")
        return self._project(opened / (1 + np.exp(-opened)) * raised, f"{name}.down_proj")


@pytest.mark.parametrize("kind", CONFIGS)
def test_two_guesses_are_those_of_a_plain_reading(kind: str, tmp_path: Path) -> None:
    folder, head = write(tmp_path, kind)
    model, notes = load(folder)
    assert not notes
    found, hidden = guess_twice(model)
    assert np.std(found[0]) > 0.1
    check_guesses(found, hidden, Plain(folder, head), atol=5e-4)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_layer_after_the_last_is_dropped_unless_it_drafts(kind: str, tmp_path: Path) -> None:
    bare = write_chat(tmp_path / "bare", **{"model_type": kind, **CONFIGS[kind]})
    folder, head = write(tmp_path / "headed", kind)
    plain, (model, notes) = load(bare)[0], load(folder, has_head=False)
    assert not notes
    np.testing.assert_array_equal(plain(mx.array([TOKENS])), model(mx.array([TOKENS])))
    assert len(make_prompt_cache(model)) == len(model.layers)
    used = load(folder)[0]
    np.testing.assert_array_equal(plain(mx.array([TOKENS])), used(mx.array([TOKENS])))
    # Its copies of the embedding and the output layer are counted neither as its own …
    own = sum(tensor.nbytes for tensor in head_tensors(Checkpoint("mine", folder)).values())
    shared = ("embed_tokens.weight", "shared_head.head.weight")
    assert own == sum(4 * each.size for name, each in head.items() if name not in shared)
    # … nor, like the rest of the layer, as the model's.
    assert Checkpoint("mine", folder).tensors() == Checkpoint("mine", bare).tensors()


@pytest.mark.parametrize("is_beside", [False, True])
def test_a_packed_head_may_have_bits_and_a_file_of_its_own(is_beside: bool, tmp_path: Path) -> None:
    folder = add_head(write_chat(tmp_path, **AFTER_LAST))
    packed = pack_head(folder, ".layers.2.", fc_bits=4)
    if is_beside:
        head = {name: packed.pop(name) for name in list(packed) if ".layers.2." in name}
        mx.save_safetensors(str(tmp_path / "mtp.safetensors"), head)
        mx.save_safetensors(str(folder / "model.safetensors"), packed)
    model, notes = load(folder)
    assert not notes
    cache = batch_of_one(make_batch_caches(model))
    model(mx.array([TOKENS]), cache=cache)
    assert np.isfinite(np.array(model.guess(cache[-2][0], mx.array([[9]]), cache[-1]))).all()


def test_a_head_in_fp8_guesses_as_its_numbers_in_float32_do(tmp_path: Path) -> None:
    """DeepSeek V3's own files are in FP8, with a scale for each 128 × 128 block."""
    folder, head = write(tmp_path / "fp8", "deepseek_v3")
    whole, _ = write(tmp_path / "whole", "deepseek_v3")
    weights: Any = mx.load(str(folder / "model.safetensors"))
    floats: Any = mx.load(str(whole / "model.safetensors"))
    packed = [f"model.layers.2.{name}" for name in head if name.endswith("_proj.weight")]
    for name in packed:
        if "eh_proj" not in name:
            codes = mx.to_fp8(weights[name] / 0.01)
            weights |= {name: codes, f"{name}_scale_inv": mx.full((1, 1), 0.01)}
            floats[name] = mx.from_fp8(codes, mx.bfloat16).astype(mx.float32) * 0.01
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    mx.save_safetensors(str(whole / "model.safetensors"), floats)
    guesses = []
    for each in (folder, whole):
        model, notes = load(each)
        assert not notes
        cache = batch_of_one(make_batch_caches(model))
        model(mx.array([TOKENS]), cache=cache)
        states = model.guess(cache[-2][0], mx.array([[9]]), cache[-1])
        guesses.append(np.array(model.score(states)))
    np.testing.assert_allclose(guesses[0], guesses[1], atol=0.05)
    assert np.std(guesses[0]) > 0.1


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("scales", lambda each: each[:, :-1]),
        ("scales", lambda each: each[:-1]),
        ("scales", lambda each: each[:, :0]),
        ("scales", lambda _: mx.array(0.0)),
        ("biases", lambda _: mx.array(0.0)),
        ("biases", lambda _: None),
        ("weight", lambda each: each[:, :-3]),
        ("weight", lambda each: each[:, :0]),
        ("weight", lambda each: each.astype(mx.float32)),
    ],
)
def test_a_packed_head_whose_arrays_do_not_fit_is_named_and_left_out(
    part: str, change: Any, tmp_path: Path
) -> None:
    folder = add_head(write_chat(tmp_path, **AFTER_LAST))
    packed = pack_head(folder, ".layers.2.", fc_bits=4)
    name = f"model.layers.2.eh_proj.{part}"
    changed = {**packed, name: change(packed[name])}
    kept = {name: each for name, each in changed.items() if each is not None}
    mx.save_safetensors(str(folder / "model.safetensors"), kept)
    model, (note,) = load(folder)
    assert note == "its MTP head is not used: it lacks or has others than these: fc"
    assert len(make_prompt_cache(model)) == len(model.layers)


@pytest.mark.parametrize("lost", ["eh_proj.weight", "self_attn.kv_b_proj.weight"])
def test_a_layer_that_lacks_arrays_is_named_and_left_out(lost: str, tmp_path: Path) -> None:
    folder, _ = write(tmp_path, "deepseek_v3")
    file = folder / "model.safetensors"
    weights: Any = mx.load(str(file))
    kept = {name: each for name, each in weights.items() if name != f"model.layers.2.{lost}"}
    mx.save_safetensors(str(file), kept)
    model, (note,) = load(folder)
    assert note.startswith("its MTP head is not used: it lacks or has others than these: ")
    assert len(make_prompt_cache(model)) == len(model.layers)


@pytest.mark.parametrize("has_head", [False, True])
@pytest.mark.parametrize("heads", [None, 0, 1])
def test_more_layers_than_a_config_counts_are_refused(
    heads: int | None, has_head: bool, tmp_path: Path
) -> None:
    config = {**AFTER_LAST, "num_nextn_predict_layers": heads}
    folder = add_head(write_chat(tmp_path, **config, num_hidden_layers=4))
    whole = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**whole, "num_hidden_layers": 2}))
    with pytest.raises(ModelLoadFailed, match=r"model\.layers\.3"):
        load(folder, has_head=has_head)


def test_the_first_of_two_heads_drafts(tmp_path: Path) -> None:
    folder = add_head(write_chat(tmp_path, **{**AFTER_LAST, "num_nextn_predict_layers": 2}))
    file = folder / "model.safetensors"
    weights: Any = mx.load(str(file))
    second = {n.replace(".2.", ".3."): each * 2 for n, each in weights.items() if ".2." in n}
    mx.save_safetensors(str(file), {**weights, **second})
    model, notes = load(folder)
    assert not notes
    [weight] = [each for name, each in weights.items() if name.endswith("eh_proj.weight")]
    np.testing.assert_array_equal(model.mtp.fc.weight, weight)


@pytest.mark.parametrize(
    ("kind", "name", "array"),
    [
        ("mimo", "model.mtp_layers.0.input_proj.weight", mx.array(1.0)),
        ("deepseek_v3", "model.layers.2.self_attn.kv_b_proj.weight", mx.zeros(3)),
        ("deepseek_v3", "model.layers.2.mlp.experts.1.gate_proj.weight", mx.zeros((3, 2))),
    ],
)
def test_a_head_whose_arrays_cannot_be_put_together_is_named_and_left_out(
    kind: str, name: str, array: mx.array, tmp_path: Path
) -> None:
    folder, _ = write(tmp_path, kind)
    weights: Any = mx.load(str(folder / "model.safetensors"))
    mx.eval(weights)  # before their file is written again
    mx.save_safetensors(str(folder / "model.safetensors"), {**weights, name: array})
    model, (note,) = load(folder)
    assert note.startswith("its MTP head is not used")
    assert len(make_prompt_cache(model)) == len(model.layers)
