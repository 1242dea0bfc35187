"""Kept prefixes go into bytes and come back, and nobody's answer changes by it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from benchmarks.steps import Steps
from gateway.engine.generation.engine import GenerationEngine
from gateway.engine.kv import prefix_pieces
from gateway.engine.kv.prefix_pieces import decode, encode
from tests.checkpoints import HYBRID, SLIDING, STATEFUL, write_chat
from tests.engine.generation.harness import (
    ARCHITECTURES,
    MAMBA,
    PLENTY,
    answers,
    bare,
    open_engine,
    tokens,
)

WIDE: dict[str, Any] = {"head_dim": 32}
KINDS: dict[str, tuple[dict[str, Any], int | None]] = {
    "plain": ({}, None),
    "in 8 bits": (WIDE, 8),
    "sliding": (SLIDING, None),
    "sliding in 4 bits": ({**SLIDING, **WIDE}, 4),
    "states": (STATEFUL, None),
    "hybrid": (HYBRID, None),
    "states alone": (MAMBA, None),
    "windows with sinks": (ARCHITECTURES["gpt_oss"], None),
    "latent": (ARCHITECTURES["deepseek_v3"], None),
}
BEGIN = tokens(150, 0)
PROMPTS = [BEGIN + tokens(120, 1), BEGIN + tokens(90, 2), tokens(150, 3)]
NEXT = [prompt + tokens(40, 9) for prompt in PROMPTS]


def move(engine: GenerationEngine, other: GenerationEngine) -> list[int]:
    """Put all that one keeps into another; return the pieces' sizes."""
    sizes = []
    for piece in engine.prefixes.pieces(0):
        content = engine.prefixes.copy_piece(0, piece)
        assert content is not None
        assert other.prefixes.put_piece(0, piece.salt, content)
        sizes.append(len(content))
    return sizes


def kept(engine: GenerationEngine, prompt: Sequence[int]) -> tuple[int, list[list[Any]]]:
    count, layers = engine.prefixes.take(prompt)
    states: Any = [tree_flatten(layer.state) for layer in layers or ()]
    return count, [
        [leaf.tolist() if isinstance(leaf, mx.array) else leaf for _, leaf in state]
        for state in states
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("piece_bytes", [1, 64 << 20])
def test_a_prompt_goes_on_to_the_bit_as_it_would_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, piece_bytes: int
) -> None:
    monkeypatch.setattr(prefix_pieces, "PIECE_BYTES", piece_bytes)
    config, kv_bits = KINDS[kind]
    folder = write_chat(tmp_path, **config)
    one, other = (open_engine(folder, prefix_cache_bytes=PLENTY, kv_bits=kv_bits) for _ in range(2))
    answers(one, [bare(prompt, max_tokens=2) for prompt in PROMPTS])
    sizes = move(one, other)
    assert len(sizes) > (len(BEGIN) // 64 if piece_bytes == 1 else 2)
    assert sum(sizes) < 1.3 * one.prefixes.pool_bytes + 4000 * len(sizes), (
        "what prompts share is there once"
    )
    assert other.prefixes.pool_bytes <= one.prefixes.pool_bytes
    for prompt in NEXT:
        assert kept(one, prompt) == kept(other, prompt)
        assert kept(one, prompt)[0] > 100
        asked = bare(prompt, max_tokens=4, logprobs=2)
        (expected,), (told,) = (answers(each, [asked]) for each in (one, other))
        assert told == expected


def test_the_piece_used_longest_ago_is_still_the_first_to_go(tmp_path: Path) -> None:
    """A prompt's end goes before its beginning."""
    folder = write_chat(tmp_path)
    one, other = (open_engine(folder, prefix_cache_bytes=PLENTY) for _ in range(2))
    for prompt in (PROMPTS[0], PROMPTS[2], PROMPTS[1]):
        answers(one, [bare(prompt, max_tokens=1)])
    move(one, other)
    while other.prefixes.pool_bytes:
        lengths = [
            [each.prefixes.count_known(prompt) for prompt in PROMPTS] for each in (one, other)
        ]
        assert lengths[0] == lengths[1]
        for each in (one, other):
            Steps(each).change(prefix_limit=each.prefixes.pool_bytes - 1)
    assert one.prefixes.pool_bytes == 0


def test_a_piece_without_room_pushes_nothing_out(tmp_path: Path) -> None:
    """A piece without its beginning is not kept, nor any piece by an engine that keeps nothing."""
    folder = write_chat(tmp_path, **SLIDING)
    one = open_engine(folder, prefix_cache_bytes=PLENTY)
    answers(one, [bare(prompt) for prompt in PROMPTS])
    pieces = [(piece, one.prefixes.copy_piece(0, piece)) for piece in one.prefixes.pieces(0)]
    other = open_engine(folder, prefix_cache_bytes=one.prefixes.pool_bytes // 2)
    answers(other, [bare(PROMPTS[2])])
    has_room = [other.prefixes.put_piece(0, "", content or b"") for _, content in pieces]
    assert has_room[0]
    assert not has_room[-1]
    assert answers(other, [bare(PROMPTS[2])])[0].cached_tokens > 100
    empty = open_engine(folder, prefix_cache_bytes=PLENTY)
    last, content = next(each for each in pieces if each[0].before)
    assert empty.prefixes.put_piece(0, "", content or b"")
    assert (empty.prefixes.pool_bytes, empty.prefixes.copy_piece(0, last)) == (0, None)
    assert not open_engine(folder).prefixes.put_piece(0, "", pieces[0][1] or b"")


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.uint32, mx.bool_, mx.int64])
def test_any_arrays_come_back_as_they_were(dtype: mx.Dtype) -> None:
    arrays = [
        mx.arange(6).reshape(1, 3, 2).astype(dtype),
        mx.zeros((2, 0), dtype),
        mx.array(1, dtype),
    ]
    arrays.append(mx.arange(24).astype(dtype).reshape(4, 6)[:, ::2])
    given: Any = ((7,), [arrays, []], [None, (3, "name", arrays), []])
    tokens, [pages, *empty], states = decode(encode(given))
    assert (tokens, empty) == ([7], [[]])
    assert states is not None
    assert (states[0], states[1][:2], states[2]) == (None, [3, "name"], [])
    for found in (pages, states[1][2]):
        for one, other in zip(arrays, found, strict=True):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            assert one.tolist() == other.tolist()


def test_states_in_the_middle_of_a_prompt_are_not_written(tmp_path: Path) -> None:
    """A slow device keeps some after each of its chunks."""
    mostly_sliding = {**SLIDING, "num_hidden_layers": 4, "sliding_window_pattern": 4}
    folder = write_chat(tmp_path, **mostly_sliding)
    one, other = (open_engine(folder, prefix_cache_bytes=PLENTY) for _ in range(2))
    prompt = tokens(700, 4)
    answers(one, [bare(prompt)], budget=64)
    move(one, other)
    assert other.prefixes.pool_bytes < one.prefixes.pool_bytes / 2
    turn = prompt + tokens(40, 9)
    assert kept(one, turn) == kept(other, turn)
    assert kept(other, turn)[0] == 640
    assert kept(one, prompt[:330])[0] > kept(other, prompt[:330])[0] == 0
