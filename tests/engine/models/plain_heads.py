"""What the tests of MTP heads share: models with a head, and its attention in numpy."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from gateway.engine.device import Device
from gateway.engine.kv.layers import batch_of_one, make_batch_caches
from gateway.engine.models.checkpoint import Checkpoint
from gateway.engine.models.decoders import open_decoder

TOKENS = [5, 17, 300, 42, 42, 7, 911, 64, 3]
Array = Any  # a numpy array of float64


def load(folder: Path, *, has_head: bool = True) -> tuple[Any, list[str]]:
    """Return a model, and the notes on its loading."""
    notes: list[str] = []
    checkpoint = Checkpoint("mine", folder)
    model, _ = open_decoder(
        checkpoint, device=Device.CPU, dtype=None, has_head=has_head, note=notes.append
    )
    return model, notes


def guess_twice(model: Any) -> tuple[list[Array], Array]:
    """Return the logits of two guesses after all tokens but the last were read, in two passes; and
    the model's states of these. The second guess follows token 9.
    """
    cache = batch_of_one(make_batch_caches(model))
    for part in (TOKENS[:4], TOKENS[4:-1]):
        model(mx.array([part]), cache=cache)
    states, kv = cache[-2:]
    first = model.guess(states[0], mx.array([TOKENS[-1:]]), kv)
    second = model.guess(first, mx.array([[9]]), kv)
    text = getattr(model, "language_model", model)
    hidden = np.array(text.model(mx.array([TOKENS[:-1]]))[0], np.float64)
    return [np.array(model.score(each)[0, 0]) for each in (first, second)], hidden


def check_guesses(found: list[Array], hidden: Array, plain: Any, atol: float) -> None:
    """Compare what `guess_twice` returns with what a plain head guesses."""
    expected = plain.guess(hidden, np.array(TOKENS[1:]))
    np.testing.assert_allclose(found[0], plain.score(expected[-1]), atol=atol)
    longer = np.concatenate([hidden, expected[-1:]])
    expected = plain.guess(longer, np.array([*TOKENS[1:], 9]))
    np.testing.assert_allclose(found[1], plain.score(expected[-1]), atol=atol)


def pack_head(folder: Path, part: str, fc_bits: int = 8) -> dict[str, Any]:
    """Quantize the matrices whose names have `part`, and return the model's arrays."""
    file = folder / "model.safetensors"
    weights: Any = mx.load(str(file))
    packed: dict[str, Any] = {}
    for name, array in weights.items():
        if part in name and array.ndim == 2:
            bits = fc_bits if "eh_proj" in name else 8
            codes: Any = mx.quantize(array, group_size=32, bits=bits)
            module = name.removesuffix(".weight")
            packed |= dict(zip((name, f"{module}.scales", f"{module}.biases"), codes, strict=True))
        else:
            packed[name] = array
    mx.save_safetensors(str(file), packed)
    config = json.loads((folder / "config.json").read_text())
    config["quantization"] = {"group_size": 32, "bits": 8}
    (folder / "config.json").write_text(json.dumps(config))
    return packed


def attend(queries: Array, keys: Array, values: Array) -> Array:
    """Return what each token attends to up to itself, (n, heads, size)."""
    scores = np.einsum("qhd,khd->hqk", queries, keys) / np.sqrt(queries.shape[-1])
    scores = np.where(np.tri(len(queries), dtype=bool), scores, -np.inf)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", shares, values)


def angles_of(base: float, dims: int, n: int) -> Array:
    """Return angles, (n, 1, dims / 2); only differences of places matter."""
    speeds = base ** (-np.arange(0, dims, 2) / dims)
    return (np.arange(n)[:, None] * speeds)[:, None]


def turn_halves(x: Array, base: float, dims: int) -> Array:
    """Rotate the first `dims` of x, (n, heads, size), the first half of them with the second."""
    angles = angles_of(base, dims, len(x))
    one, other, rest = x[..., : dims // 2], x[..., dims // 2 : dims], x[..., dims:]
    turned = one * np.cos(angles) - other * np.sin(angles)
    swapped = other * np.cos(angles) + one * np.sin(angles)
    return np.concatenate([turned, swapped, rest], axis=-1)
