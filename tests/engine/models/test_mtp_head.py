"""Qwen3.5's MTP head guesses as a plain reading of its description does, however it is stored."""

import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from gateway.engine.device import Device
from gateway.engine.models.checkpoint import Checkpoint
from gateway.engine.models.decoders import Numbers, parameters, read_decoder
from tests.checkpoints import HEADED, add_head, write_chat
from tests.engine.models.plain_heads import (
    TOKENS,
    Array,
    attend,
    check_guesses,
    guess_twice,
    load,
    pack_head,
    turn_halves,
)

MIXTURE = {**HEADED, "model_type": "qwen3_5_moe_text", "num_experts": 4}
PREFIX = "language_model.mtp."
LAYER = f"{PREFIX}layers.0."


class Plain:
    """The head in numpy: all pairs at once, no KV."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        loaded: Any = mx.load(str(folder / "model.safetensors"))
        self.weights = {name: np.array(each, np.float64) for name, each in loaded.items()}
        self.embeddings = self.weights["language_model.model.embed_tokens.weight"]
        self.epsilon = self.config["rms_norm_eps"]

    def guess(self, hidden: Array, tokens: Array) -> Array:
        """Return the states after pairs of the tokens and the states before them, (n, width)."""
        w = self.weights
        pair = (
            self._norm(self.embeddings[tokens], w[f"{PREFIX}pre_fc_norm_embedding.weight"]),
            self._norm(hidden, w[f"{PREFIX}pre_fc_norm_hidden.weight"]),
        )
        x = np.concatenate(pair, axis=-1) @ w[f"{PREFIX}fc.weight"].T
        x = x + self._attend(self._norm(x, w[f"{LAYER}input_layernorm.weight"]))
        x = x + self._feed(self._norm(x, w[f"{LAYER}post_attention_layernorm.weight"]))
        return self._norm(x, w[f"{PREFIX}norm.weight"])

    def score(self, states: Array) -> Array:
        head = self.weights.get("language_model.lm_head.weight", self.embeddings)
        return states @ head.T

    def _norm(self, x: Array, weight: Array) -> Array:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.epsilon) * weight

    def _project(self, x: Array, name: str) -> Array:
        return x @ self.weights[f"{LAYER}{name}.weight"].T

    def _attend(self, x: Array) -> Array:
        config, n = self.config, len(x)
        heads, size = config["num_attention_heads"], config["head_dim"]
        both = self._project(x, "self_attn.q_proj").reshape(n, heads, 2 * size)
        queries, gate = both[..., :size], both[..., size:]
        keys = self._project(x, "self_attn.k_proj").reshape(n, -1, size)
        values = self._project(x, "self_attn.v_proj").reshape(n, -1, size)
        queries = self._turn(self._norm(queries, self.weights[f"{LAYER}self_attn.q_norm.weight"]))
        keys = self._turn(self._norm(keys, self.weights[f"{LAYER}self_attn.k_norm.weight"]))
        keys, values = (np.repeat(each, heads // each.shape[1], axis=1) for each in (keys, values))
        attended = attend(queries, keys, values) / (1 + np.exp(-gate))
        return self._project(attended.reshape(n, -1), "self_attn.o_proj")

    def _turn(self, x: Array) -> Array:
        rope = self.config["rope_parameters"]
        dims = int(x.shape[-1] * rope["partial_rotary_factor"])
        return turn_halves(x, rope["rope_theta"], dims)

    def _feed(self, x: Array) -> Array:
        if not self.config["num_experts"]:
            return self._gated(x, *(self.weights[f"{LAYER}mlp.{n}_proj.weight"] for n in GATED))
        chances = np.exp(self._project(x, "mlp.gate"))
        chances /= chances.sum(axis=-1, keepdims=True)
        experts = [self.weights[f"{LAYER}mlp.switch_mlp.{name}_proj.weight"] for name in GATED]
        shared = [self.weights[f"{LAYER}mlp.shared_expert.{name}_proj.weight"] for name in GATED]
        fed = []
        for each, chance in zip(x, chances, strict=True):
            chosen = np.argsort(-chance)[: self.config["num_experts_per_tok"]]
            part = chance[chosen] / chance[chosen].sum()
            fed.append(
                sum(
                    p * self._gated(each, *(weight[expert] for weight in experts))
                    for p, expert in zip(part, chosen, strict=True)
                )
            )
        gate = 1 / (1 + np.exp(-self._project(x, "mlp.shared_expert_gate")))
        return np.array(fed) + gate * self._gated(x, *shared)

    def _gated(self, x: Array, gate: Array, up: Array, down: Array) -> Array:
        opened = x @ gate.T
        return (opened / (1 + np.exp(-opened)) * (x @ up.T)) @ down.T


GATED = ("gate", "up", "down")


def rewrite(folder: Path, change: Callable[[str, mx.array], tuple[str, mx.array]]) -> None:
    file = folder / "model.safetensors"
    weights: Any = mx.load(str(file))
    changed = dict(change(name, each) for name, each in weights.items())
    mx.save_safetensors(str(file), changed)


@pytest.mark.parametrize("config", [HEADED, MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_two_guesses_are_those_of_a_plain_reading(
    config: dict[str, Any], is_tied: bool, tmp_path: Path
) -> None:
    folder = add_head(write_chat(tmp_path, **{**config, "tie_word_embeddings": is_tied}))
    rewrite(folder, lambda name, each: (name, each * 1.2 + 0.1 if "norm" in name else each))
    check_guesses(*guess_twice(load(folder)[0]), Plain(folder), atol=2e-4)


def as_published(name: str, array: mx.array) -> tuple[str, mx.array]:
    """Store an array as transformers does."""
    name = name.replace("language_model.mtp.", "mtp.")
    name = name.replace("language_model.model.", "model.language_model.")
    name = name.removeprefix("language_model.")
    if "conv1d" in name:
        return name, array.moveaxis(2, 1)
    is_shifted = "norm" in name and "linear_attn" not in name
    return name, array - 1 if is_shifted else array


def with_raw_head(name: str, array: mx.array) -> tuple[str, mx.array]:
    """Store only the head as transformers does."""
    if ".mtp." not in name:
        return name, array
    return as_published(name, array)


@pytest.mark.parametrize("change", [as_published, with_raw_head])
def test_the_norms_of_a_head_are_read_in_either_form(change: Any, tmp_path: Path) -> None:
    folder = add_head(write_chat(tmp_path, **HEADED))
    rewrite(folder, lambda name, each: (name, each * 0.3 if "pre_fc" in name else each))
    expected, _ = guess_twice(load(folder)[0])
    rewrite(folder, change)
    if change is as_published:  # the config too
        text = json.loads((folder / "config.json").read_text())
        whole = {"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": False}
        (folder / "config.json").write_text(json.dumps(whole))
    model, notes = load(folder)
    assert not notes
    found, _ = guess_twice(model)
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_experts_of_a_head_are_read_whole_or_one_by_one(tmp_path: Path) -> None:
    folder = add_head(write_chat(tmp_path, **MIXTURE))
    expected, _ = guess_twice(load(folder)[0])
    file = folder / "model.safetensors"
    written: Any = mx.load(str(file))
    for is_whole in (True, False):
        weights = dict(written)
        gate, up, down = (
            weights.pop(f"{LAYER}mlp.switch_mlp.{name}_proj.weight") for name in GATED
        )
        if is_whole:
            weights[f"{LAYER}mlp.experts.gate_up_proj"] = mx.concatenate([gate, up], axis=1)
            weights[f"{LAYER}mlp.experts.down_proj"] = down
        else:
            for name, stacked in zip(GATED, (gate, up, down), strict=True):
                for i, expert in enumerate(stacked):
                    weights[f"{LAYER}mlp.experts.{i}.{name}_proj.weight"] = expert
        mx.save_safetensors(str(file), weights)
        model, notes = load(folder)
        assert not notes
        np.testing.assert_allclose(guess_twice(model)[0], expected, atol=1e-4)


def test_a_quantized_head_guesses_nearly_the_same(tmp_path: Path) -> None:
    folder = add_head(write_chat(tmp_path, **HEADED))
    expected, _ = guess_twice(load(folder)[0])
    pack_head(folder, ".mtp.")
    model, notes = load(folder)
    assert not notes
    found, _ = guess_twice(model)
    np.testing.assert_allclose(found, expected, atol=0.05 * float(np.std(expected[0])))


@pytest.mark.parametrize(
    ("lacking", "extra"),
    [
        ("norm.weight", None),
        (None, "layers.1.self_attn.q_proj.weight"),
        (None, "embed_tokens.weight"),
    ],
)
def test_a_head_of_another_form_is_named_and_left_out(
    lacking: str | None, extra: str | None, tmp_path: Path
) -> None:
    folder = add_head(write_chat(tmp_path, **HEADED))
    plain = np.array(load(folder)[0].language_model.model(mx.array([TOKENS])))
    file = folder / "model.safetensors"
    weights: Any = mx.load(str(file))
    weights = {name: each for name, each in weights.items() if name != f"{PREFIX}{lacking}"}
    if extra is not None:
        weights[f"{PREFIX}{extra}"] = mx.zeros((2, 2))
    mx.save_safetensors(str(file), weights)
    model, notes = load(folder)
    (note,) = notes
    assert note.startswith("its MTP head is not used")
    assert str(lacking or extra) in note
    np.testing.assert_array_equal(plain, model.language_model.model(mx.array([TOKENS])))
    assert len(model.make_cache()) == len(model.layers)


@pytest.mark.parametrize("dtype", [mx.uint8, mx.int32, mx.bool_, mx.complex64])
def test_a_head_of_numbers_that_are_not_floating_is_named_and_left_out(
    dtype: mx.Dtype, tmp_path: Path
) -> None:
    folder = add_head(write_chat(tmp_path, **HEADED))

    def change(name: str, each: mx.array) -> tuple[str, mx.array]:
        return name, each.astype(dtype) if name == f"{PREFIX}fc.weight" else each

    rewrite(folder, change)
    model, (note,) = load(folder)
    assert note.endswith("fc.weight")
    assert len(model.make_cache()) == len(model.layers)


def read(folder: Path, numbers: Numbers) -> Any:
    checkpoint = Checkpoint("mine", folder)

    def steps() -> Iterator[Any]:
        yield (
            yield from read_decoder(checkpoint, device=Device.CPU, numbers=numbers, has_head=True)
        )

    *_, model = steps()
    return model


def test_a_heads_arrays_as_stored_are_freed_once_they_are_read(tmp_path: Path) -> None:
    """Nor do those in memory outlive the model, although Python keeps its class for a while."""
    folder = add_head(write_chat(tmp_path, **HEADED))
    rewrite(folder, lambda name, each: (name, each.astype(mx.bfloat16)))
    numbers = Numbers(dtype="float32")
    gc.collect()
    before = mx.get_active_memory()
    gc.disable()
    try:
        model = read(folder, numbers)
        needed = sum(array.nbytes for array in parameters(model))
        head = sum(array.nbytes for array in parameters(model.language_model.mtp))
        assert mx.get_active_memory() - before < needed + head / 4
        del model
        assert mx.get_active_memory() - before < head / 4
    finally:
        gc.enable()
