"""The tenth turn of a conversation, warm and cold, on models that keep KV, windows and states.

Each of ten prompts is the one before, its answer and new tokens; the tenth has some 2,000. Its time
to first token is measured on an engine that has answered the other nine, and on one that keeps
nothing yet. Then prompts that have nothing in common: one after another, and all at once. Then how
fast one answer and several are written, with kept prefixes and without. Models have random
weights; ratios count: the compared sides run in turn, in one process.

    python -m benchmarks.conversations --rounds 5
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

from benchmarks.loading import load_generation
from benchmarks.steps import Steps
from gateway.engine.device import Device, choose_device, configure, prepare_malloc
from gateway.engine.generation.engine import GenerationEngine
from gateway.jobs.chat import Sampling
from gateway.jobs.steps import SequenceParams

# mlx comes after OpenBLAS, which the lines above load.
import mlx.core as mx  # isort: skip
from mlx.utils import tree_flatten  # isort: skip
from mlx_lm.utils import _get_classes  # isort: skip

TOKENIZER: Final = Path(__file__).parents[1] / "demo" / "chat"
VOCABULARY: Final = 1026  # the tokenizer's size
PLENTY: Final = 4 << 30  # bytes of prefixes: none is evicted
TURNS: Final = 10
COMMON: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "plain KV (llama)": {**COMMON, "model_type": "llama", "rope_theta": 10000.0},
    # Seven layers of eight look at a window, as in gemma 3's text models five of six do.
    "sliding windows (gemma3)": {
        **COMMON,
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 64,
        "sliding_window": 512,
        "sliding_window_pattern": 8,
    },
    # Three layers of four are linear attention.
    "hybrid (qwen3_5)": {
        "model_type": "qwen3_5",
        "text_config": {
            **COMMON,
            "model_type": "qwen3_5_text",
            "linear_num_value_heads": 8,
            "linear_num_key_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "full_attention_interval": 4,
        },
    },
}


def write_model(folder: Path, config: dict[str, Any]) -> Path:
    """Write a checkpoint with random weights, and the tests' tokenizer."""
    shutil.copytree(TOKENIZER, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.md"))
    whole = {**config, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(whole), encoding="utf-8")
    mx.random.seed(0)
    classes: Any = _get_classes(whole)
    model = classes[0](classes[1].from_dict(dict(whole)))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    return folder


def open_engine(folder: Path, device: Device, kept: int) -> GenerationEngine:
    return load_generation(folder, name=folder.name, device=device, prefix_cache_bytes=kept)


def draw(random: Random, tokens: int) -> list[int]:
    return [random.randrange(300, 1000) for _ in range(tokens)]


def ask(engine: GenerationEngine, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Answer a prompt; return the answer."""
    steps = Steps(engine)
    steps.join(0, _params(prompt, max_tokens))
    (row,) = engine._sequences._prefill.seqs
    while steps.is_busy:
        steps.prefill(512)
        steps.decode()
    return row.tokens


def time_first(
    engine: GenerationEngine, prompts: Sequence[Sequence[int]], chunk: int
) -> tuple[float, int]:
    """Return the seconds until each of some prompts has a first token, and how many tokens of them
    were cached.
    """
    steps = Steps(engine)
    started, waiting, cached = time.perf_counter(), set(range(len(prompts))), 0
    for number, prompt in enumerate(prompts):
        steps.join(number, _params(prompt, 2))
    while waiting:
        deltas = [*steps.prefill(chunk)] if steps.is_reading else []
        if not steps.is_reading:
            deltas += steps.decode()
        cached += sum(delta.cached_tokens for delta in deltas)
        waiting -= {delta.id for delta in deltas}
    spent = time.perf_counter() - started
    while steps.is_decoding:
        steps.decode()
    return spent, cached


def time_writing(engine: GenerationEngine, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    """Return how many tokens of answers to some prompts are written a second."""
    steps, ids = Steps(engine), range(len(prompts))
    for number, prompt in enumerate(prompts):
        steps.join(number, _params(prompt, 2 * tokens))
    while steps.is_reading:
        steps.prefill(512)
    steps.decode()
    engine.synchronize()
    started = time.perf_counter()
    for _ in range(tokens):
        steps.decode()
    engine.synchronize()
    spent = time.perf_counter() - started
    steps.leave(*ids)
    return len(prompts) * tokens / spent


def _params(prompt: Sequence[int], max_tokens: int) -> SequenceParams:
    sampling = Sampling(temperature=0, ignore_eos=True)
    return SequenceParams(
        prompt=list(prompt), max_tokens=max_tokens, sampling=sampling, is_bare=True
    )


def measure(folder: Path, device: Device, given: argparse.Namespace) -> Iterator[str]:
    """Yield a row's cells."""
    random = Random(0)
    warm, cold, bare = (open_engine(folder, device, kept) for kept in (PLENTY, PLENTY, 0))
    new = given.tokens // TURNS - given.answer
    history: list[int] = []
    for _ in range(TURNS - 1):
        history += draw(random, new)
        history += ask(warm, history, given.answer)
    ratios, gains, times = [], [], []
    paces: dict[int, list[float]] = {1: [], given.burst: []}
    for turn in range(given.rounds + 1):
        prompt = history + draw(random, new + given.answer)
        again, cached = time_first(warm, [prompt], given.chunk)
        Steps(cold).change(clear_prefixes=True)
        first, none = time_first(cold, [prompt], given.chunk)
        assert none == 0
        bursts = [[draw(random, given.prompt + 9 * i) for i in range(given.burst)] for _ in "ab"]
        apart = sum(time_first(cold, [each], given.chunk)[0] for each in bursts[0])
        together, _ = time_first(cold, bursts[1], given.chunk)
        for rows, found in paces.items():
            kept, none_kept = (
                time_writing(engine, bursts[0][:rows], given.written) for engine in (cold, bare)
            )
            found += [kept / none_kept] if turn else []
        if turn:  # the first warms up
            ratios.append(again / first)
            times.append((again, first))
            gains.append(apart / together)
    again, first = (1000 * statistics.median(column) for column in zip(*times, strict=True))
    yield f"{len(prompt)}, {cached}"
    yield f"{again:.0f} / {first:.0f} ms"
    yield _spread(ratios)
    yield _spread(gains)
    for found in paces.values():
        yield _spread(found)
    for engine in (warm, cold, bare):
        engine.close()


def _spread(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.3g} ({min(ratios):.3g}–{max(ratios):.3g})"


def main(arguments: Sequence[str]) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description="The tenth turn of a conversation.")
    parser.add_argument("--tokens", type=int, default=2000, help="of the tenth prompt")
    parser.add_argument("--answer", type=int, default=40, help="tokens of each answer")
    parser.add_argument("--burst", type=int, default=8, help="prompts at once")
    parser.add_argument("--prompt", type=int, default=100, help="tokens of the shortest of them")
    parser.add_argument("--chunk", type=int, default=512, help="GATEWAY_PREFILL_CHUNK_TOKENS")
    parser.add_argument("--written", type=int, default=128, help="tokens of those answers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="auto")
    given = parser.parse_args(arguments)
    device = choose_device(given.device)
    if device is Device.CPU:
        prepare_malloc()
    configure(device)
    head = (
        "Model",
        "tokens of the tenth prompt, cached",
        "time to first token, warm / cold",
        "ratio",
        f"{given.burst} prompts, one after another / at once",
        "tokens/s of one answer, kept / not",
        f"of {given.burst} answers, kept / not",
    )
    print(f"| {' | '.join(head)} |\n|{' --- |' * len(head)}")
    with tempfile.TemporaryDirectory() as root:
        for i, (name, config) in enumerate(FAMILIES.items()):
            cells = measure(write_model(Path(root) / str(i), config), device, given)
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
