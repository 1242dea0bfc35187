"""The forward pass of training: a tower's and a decoder's parameters, in batches and with
gradients.

The gateway's tower reads one image at a time and in parts; a test compares the two.
"""

from typing import Final, cast

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx_lm.models import qwen3
from numpy.typing import NDArray

from demo.forward import cross_entropy, quick_exp, silu
from gateway.engine.vision.patches import QwenPatches
from gateway.engine.vision.qwen import QwenTower
from gateway.engine.vision.tower_numbers import TowerNumbers

GRID: Final = 6  # patches per side of a picture
MERGE: Final = 2
TOKENS: Final = (GRID // MERGE) ** 2
_THETA: Final = 10000.0


class Seeing(Module):
    """A tower and a decoder, trained together."""

    def __init__(self, vision: TowerNumbers, text: qwen3.ModelArgs) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.visual = QwenTower(vision)
        self.language_model = qwen3.Model(text)


@mx.custom_function
def _sigmoid(x: mx.array) -> mx.array:
    return 1.0 / (1.0 + quick_exp(mx.minimum(-x, 80.0)))


@_sigmoid.vjp
def _sigmoid_vjp(primals: mx.array, cotangents: mx.array, outputs: mx.array) -> mx.array:
    return cotangents * outputs * (1.0 - outputs)


@mx.custom_function
def _softmax(scores: mx.array, visible: mx.array) -> mx.array:
    """Softmax over the last axis of what is visible (1 or 0), else exact zeros: denormal numbers
    make products tens of times as slow.
    """
    weights = quick_exp(scores - scores.max(axis=-1, keepdims=True)) * visible
    return weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)


@_softmax.vjp
def _softmax_vjp(
    primals: tuple[mx.array, mx.array], cotangents: mx.array, outputs: mx.array
) -> tuple[mx.array, mx.array]:
    weighted = cotangents * outputs
    found = weighted - outputs * weighted.sum(axis=-1, keepdims=True)
    return found, mx.zeros_like(primals[1])


def _gelu(x: mx.array) -> mx.array:
    """Return GELU by its tanh formula; the mergers' exact one differs by less than 5e-4."""
    slope = 2.0 * (2.0 / np.pi) ** 0.5
    return x * cast(mx.array, _sigmoid(x * (slope + 0.044715 * slope * (x * x))))


def as_patches(pictures: list[NDArray[np.uint8]], patches: QwenPatches) -> NDArray[np.float32]:
    """Return pictures' patches, (pictures, patches, values), with one of the equal frames."""
    rows = [patches.to_patches(picture) for picture in pictures]
    stacked = np.stack(rows).reshape(len(rows), -1, 3, patches.frames, patches.patch**2)
    return np.ascontiguousarray(stacked[:, :, :, 0]).reshape(len(rows), stacked.shape[1], -1)


def places() -> NDArray[np.int32]:
    """Return the row and the column of each patch, (patches, 2), ordered by token."""
    side = GRID // MERGE
    shape = side, MERGE, side, MERGE
    by_token = (each.reshape(shape).transpose(0, 2, 1, 3) for each in np.mgrid[:GRID, :GRID])
    return np.stack([each.reshape(-1) for each in by_token], 1).astype(np.int32)


def features(tower: QwenTower, patches: mx.array, where: mx.array) -> list[mx.array]:
    """Return the features of patches (pictures, patches, values) at the places `where`: those of
    the last layer and of DeepStack's, each (pictures × tokens, decoder's width).
    """
    numbers = tower.numbers
    batch, count, _ = patches.shape
    shape = numbers.hidden, 3, numbers.frames, numbers.patch**2
    projection = tower.patch_embed.proj
    kernel = projection.weight.reshape(shape).sum(axis=2)  # the frames are equal
    x = patches @ kernel.reshape(numbers.hidden, -1).T + projection.bias
    half = numbers.head // 2
    frequencies = 1.0 / _THETA ** (mx.arange(0, half, 2) / half)
    angles = (where[..., None].astype(mx.float32) * frequencies).reshape(count, -1)
    cos, sin = mx.cos(angles), mx.sin(angles)
    found: list[mx.array] = []
    width = numbers.hidden * numbers.merge**2
    for number, block in enumerate(tower.blocks):
        qkv = block.attn.qkv(block.norm1(x)).reshape(batch, count, 3, numbers.heads, -1)
        q, k, v = (qkv[:, :, each].transpose(0, 2, 1, 3) for each in range(3))
        q, k = (_turn(each, cos, sin) for each in (q, k))
        scores = q @ k.transpose(0, 1, 3, 2) * q.shape[-1] ** -0.5
        weights = cast(mx.array, _softmax(scores, mx.ones_like(scores)))
        joined = (weights @ v).transpose(0, 2, 1, 3).reshape(batch, count, -1)
        x = x + block.attn.proj(joined)
        x = x + block.mlp.linear_fc2(_gelu(block.mlp.linear_fc1(block.norm2(x))))
        if number in numbers.deepstack:
            merger = tower.deepstack_merger_list[numbers.deepstack.index(number)]
            found.append(_merge(merger, merger.norm(x.reshape(-1, width))))
    normed = tower.merger.norm(x).reshape(-1, width)
    return [_merge(tower.merger, normed), *found]


def _turn(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    a, b = mx.split(x, 2, axis=-1)
    return mx.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _merge(merger: Module, x: mx.array) -> mx.array:
    return cast(mx.array, merger.linear_fc2(_gelu(merger.linear_fc1(x))))


def rotations(
    points: NDArray[np.int32], text: qwen3.ModelArgs, axes: list[int]
) -> NDArray[np.float32]:
    """Return cosines and sines of M-RoPE at positions (rows, length, 3), (2, rows × length, width
    of all heads); `axes` say which of the three turns a pair.
    """
    assert text.head_dim is not None
    assert text.rope_theta is not None
    half = text.head_dim // 2
    speeds = text.rope_theta ** (-np.arange(half) / half)
    angles = points.reshape(-1, 3)[:, axes] * speeds
    heads = np.tile(angles, 2 * text.num_attention_heads)
    return np.stack([np.cos(heads), np.sin(heads)]).astype(np.float32)


def _swaps(text: qwen3.ModelArgs) -> mx.array:
    """Return the matrix that turns the halves of each head by a right angle."""
    assert text.head_dim is not None
    half = text.head_dim // 2
    turn = np.kron(np.array([[0, 1], [-1, 0]], np.float32), np.eye(half, dtype=np.float32))
    return mx.array(np.kron(np.eye(text.num_attention_heads, dtype=np.float32), turn))


def loss_at(
    model: Seeing,
    patches: mx.array,
    where: mx.array,
    words: mx.array,
    pictures: mx.array,
    turns: mx.array,
    visible: mx.array,
    chosen: mx.array,
    targets: mx.array,
) -> mx.array:
    """Mean cross-entropy of `targets` at the flat places `chosen`.

    Rows of `words`, (rows × length, vocabulary), and of `pictures`, (rows, length, tokens of a
    picture), have a one for a token of text or a feature; turns are of `rotations`; visible, (rows,
    heads, length, length), has a one where a token sees another. mlx is slow on general strides
    on a CPU, so all that is large is contiguous here.
    """
    rows, length, _ = pictures.shape
    seen = [
        (pictures @ each.reshape(rows, TOKENS, -1)).reshape(rows * length, -1)
        for each in features(model.visual, patches, where)
    ]
    decoder = model.language_model
    text = decoder.args
    swaps = _swaps(text)
    x = words @ decoder.model.embed_tokens.weight + seen[0]

    def split(y: mx.array) -> mx.array:
        return y.reshape(rows, length, text.num_attention_heads, -1).transpose(0, 2, 1, 3)

    def turn(y: mx.array, norm: Module) -> mx.array:
        y = norm(y.reshape(-1, text.head_dim)).reshape(rows * length, -1)
        return split(y * turns[0] + (y @ swaps) * turns[1])

    for number, layer in enumerate(decoder.layers):
        h, attention = layer.input_layernorm(x), layer.self_attn
        q = turn(attention.q_proj(h), attention.q_norm) * attention.scale
        k = turn(attention.k_proj(h), attention.k_norm)
        weights = cast(mx.array, _softmax(q @ k.transpose(0, 1, 3, 2), visible))
        joined = (weights @ split(attention.v_proj(h))).transpose(0, 2, 1, 3)
        x = x + attention.o_proj(joined.reshape(rows * length, -1))
        h = layer.post_attention_layernorm(x)
        x = x + layer.mlp.down_proj(silu(layer.mlp.gate_proj(h)) * layer.mlp.up_proj(h))
        if number + 1 < len(seen):
            x = x + seen[number + 1]
    return cross_entropy(decoder, decoder.model.norm(x), chosen, targets)
