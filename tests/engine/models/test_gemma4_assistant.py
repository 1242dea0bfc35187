"""Gemma 4's drafter guesses as a plain reading of its description does."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from gateway.engine.device import Device
from gateway.engine.models.checkpoint import Checkpoint
from gateway.engine.models.decoders import open_decoder
from gateway.errors import ModelLoadFailed
from tests.checkpoints import GEMMA4, write_assistant, write_chat

Array = Any  # a numpy array of float64
KEYS = 21
COUNTS = (KEYS, 13)  # places of each row that are in use
TURNED = {"sliding_attention": (1.0, 10_000.0), "full_attention": (0.25, 1_000_000.0)}


class Plain:
    """The drafter in numpy, for one row."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.text = self.config["text_config"]
        loaded: Any = mx.load(str(folder / "model.safetensors"))
        self.weights = {name: np.array(each, np.float64) for name, each in loaded.items()}

    def guess(self, both: Array, kv: dict[str, tuple[Array, Array]], place: int) -> Array:
        """Return the state, (width,), made of a token's embedding and the state before it."""
        x = self.weights["pre_projection.weight"] @ both
        for index, kind in enumerate(self.text["layer_types"]):
            layer = f"model.layers.{index}"
            attended = self._attend(
                self._norm(x, f"{layer}.input_layernorm"), layer, kind, kv, place
            )
            x = x + self._norm(attended, f"{layer}.post_attention_layernorm")
            fed = self._feed(self._norm(x, f"{layer}.pre_feedforward_layernorm"), f"{layer}.mlp")
            x = x + self._norm(fed, f"{layer}.post_feedforward_layernorm")
            x = x * self.weights[f"{layer}.layer_scalar"]
        return self._norm(x, "model.norm")

    def score(self, state: Array) -> Array:
        """Return the logits of all tokens; those of lists that are unlikely are -inf."""
        logits = self.weights["model.embed_tokens.weight"] @ state
        if self.config.get("use_ordered_embeddings"):
            groups = self.weights["masked_embedding.centroids.weight"] @ state
            count = self.config["centroid_intermediate_top_k"]
            lists = self.weights["masked_embedding.token_ordering"].astype(int)
            lists = lists.reshape(len(groups), -1)
            likely = lists[np.argsort(groups)[-count:]].ravel()
            logits[np.setdiff1d(np.arange(len(logits)), likely)] = -np.inf
        return logits

    def _norm(self, x: Array, name: str) -> Array:
        size = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.text["rms_norm_eps"])
        return x / size * self.weights[f"{name}.weight"]

    def _attend(
        self, x: Array, layer: str, kind: str, kv: dict[str, tuple[Array, Array]], place: int
    ) -> Array:
        keys, values = kv[kind]
        heads, size = self.text["num_attention_heads"], keys.shape[-1]
        queries = (self.weights[f"{layer}.self_attn.q_proj.weight"] @ x).reshape(heads, size)
        queries = self._norm(queries, f"{layer}.self_attn.q_norm")
        share, base = TURNED[kind]
        half, turned = size // 2, int(size * share) // 2
        angles = np.zeros(half)
        angles[:turned] = place * base ** (-2 * np.arange(turned) / size)
        one, other = queries[:, :half], queries[:, half:]
        sines, cosines = np.sin(angles), np.cos(angles)
        pair = [one * cosines - other * sines, other * cosines + one * sines]
        queries = np.concatenate(pair, axis=-1)
        keys, values = (np.repeat(each, heads // len(each), axis=0) for each in (keys, values))
        scores = np.einsum("hd,hkd->hk", queries, keys)
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        attended = np.einsum("hk,hkd->hd", shares, values)
        projected: Array = self.weights[f"{layer}.self_attn.o_proj.weight"] @ attended.ravel()
        return projected

    def _feed(self, x: Array, name: str) -> Array:
        gate, up = (self.weights[f"{name}.{part}_proj.weight"] @ x for part in ("gate", "up"))
        gelu = gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        fed: Array = self.weights[f"{name}.down_proj.weight"] @ (gelu * up)
        return fed


@pytest.mark.parametrize("is_ordered", [False, True])
def test_a_guess_is_that_of_plain_numpy(tmp_path: Path, is_ordered: bool) -> None:
    target = write_chat(tmp_path / "target", **GEMMA4)
    options: dict[str, Any] = {
        "use_ordered_embeddings": is_ordered,
        "centroid_intermediate_top_k": 2,
    }
    folder = write_assistant(tmp_path / "drafter", target, **options)
    model, _ = open_decoder(Checkpoint("drafter", folder), device=Device.CPU, dtype=None)
    plain, chance = Plain(folder), np.random.default_rng(4)
    kv: dict[str, tuple[Array, Array]] = {}
    for kind, size in (("sliding_attention", 16), ("full_attention", 32)):
        keys, values = (chance.normal(size=(2, 2, KEYS, size)) for _ in range(2))
        kv[kind] = keys, values
    both = chance.normal(size=(2, 1, 2 * 64))
    places = [40, 13]
    mask = mx.arange(KEYS) < mx.array(COUNTS)[:, None]
    given = {
        kind: (mx.array(keys, mx.float32), mx.array(values, mx.float32), mask[:, None, None])
        for kind, (keys, values) in kv.items()
    }
    states = model(mx.array(both, mx.float32), given, mx.array(places))
    logits = np.array(model.score(states))
    for row, (place, count) in enumerate(zip(places, COUNTS, strict=True)):
        own = {
            kind: (keys[row, :, :count], values[row, :, :count])
            for kind, (keys, values) in kv.items()
        }
        state = plain.guess(both[row, 0], own, place)
        np.testing.assert_allclose(np.array(states[row, 0]), state, atol=2e-5)
        np.testing.assert_allclose(logits[row, 0], plain.score(state), atol=1e-3)
        assert np.isinf(logits[row, 0]).any() == is_ordered


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_ordered_embeddings": True, "num_centroids": 11}, "num_centroids does not divide"),
        (
            {"use_ordered_embeddings": True, "num_centroids": 1, "centroid_intermediate_top_k": 2},
            "centroid_intermediate_top_k is not in 1",
        ),
        ({"tie_word_embeddings": False}, "has tied embeddings and no experts"),
        ({"enable_moe_block": True}, "has tied embeddings and no experts"),
    ],
)
def test_a_drafter_of_another_make_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    target = write_chat(tmp_path / "target", **GEMMA4)
    folder = write_assistant(tmp_path / "drafter", target)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    text = config["text_config"] | {key: changes[key] for key in changes if "moe" in key}
    file.write_text(json.dumps(config | changes | {"text_config": text}))
    with pytest.raises(ModelLoadFailed, match=reason):
        open_decoder(Checkpoint("drafter", folder), device=Device.CPU, dtype=None)
