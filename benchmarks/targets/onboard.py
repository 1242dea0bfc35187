"""SmolLM2 as it is shipped: tokens a second beside mlx-lm's own server and llama.cpp."""

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.checkpoints import write_unpacked
from benchmarks.llama_cpp import llama_cpp
from benchmarks.targets.chatting import MLX_LM_NAME
from benchmarks.targets.rig import SMOLLM2, SMOLLM2_GGUF, SMOLLM2_PACKAGE, Rig, errors, rate, rest
from benchmarks.targets.verdicts import Target, Verdict, not_measured, ratio
from benchmarks.workloads import burst
from gateway.bench.figures import Answer
from gateway.bench.requests import Kind
from gateway.registry.sources import package_folder

TOKENS, PROMPT_TOKENS = 96, 128
LLAMA_CPP = {
    1: Target("SmolLM2 tokens/s, streams: 1; HTTP, float32 / llama.cpp in-process, Q4_1"),
    8: Target("SmolLM2 tokens/s, streams: 8; HTTP, float32 / llama.cpp in-process, Q4_1", 1.0),
    32: Target("SmolLM2 tokens/s, streams: 32; HTTP, float32 / llama.cpp in-process, Q4_1", 1.0),
}
SERVER = {
    streams: Target(f"SmolLM2 tokens/s, streams: {streams}; HTTP / mlx-lm's own server", 1.2)
    for streams in LLAMA_CPP
}
BOUND = Target("SmolLM2 tokens/s, streams: 1; HTTP / the weights read at memory's speed")


@dataclass(frozen=True, slots=True)
class Round:
    """The answers of both servers to the same prompts, and llama.cpp's tokens a second."""

    own: Sequence[Answer]
    other: Sequence[Answer]
    llama: float | None


async def onboard(rig: Rig) -> list[Verdict]:
    """The same prompts for each, greedily, until the model ends or has written `TOKENS`.

    The gateway and mlx-lm's server stream over HTTP, from float32 on a CPU; llama.cpp reads the
    file's 4 bits, in-process.
    """
    tokens = max(16, round(rig.seconds(TOKENS)))
    package = package_folder(SMOLLM2_PACKAGE)
    if package is None:
        return [not_measured("SmolLM2 tokens/s", f"{SMOLLM2_PACKAGE} is not installed")]
    file = package / SMOLLM2_GGUF
    unpacked = write_unpacked(file, rig.folder / SMOLLM2)
    verdicts = []
    async with rig.gateway() as ours, rig.mlx_lm(SMOLLM2) as theirs:
        for streams in LLAMA_CPP:
            rounds = []
            for _ in range(rig.rounds + 1):
                wording = rig.wording(SMOLLM2, max_tokens=tokens)
                own = await burst(ours, wording.workload(Kind.CHAT), streams)
                await rest()
                named = replace(wording, model=MLX_LM_NAME)
                other = await burst(theirs, named.workload(Kind.CHAT), streams)
                await rest()
                prompts = [unpacked.encode(wording.prompts[n]) for n in range(streams)]
                llama = await _llama_rate(rig, file, prompts, tokens)
                await rest()
                rounds.append(Round(own, other, llama))
            verdicts += judged(streams, rounds)
            if streams == 1:
                verdicts.append(_bound(rounds, unpacked.nbytes))
    return verdicts


def judged(streams: int, rounds: Sequence[Round]) -> list[Verdict]:
    """Judge both. Of the first round, in which each makes its shapes, only errors count."""
    wrong = sum(errors(each.own) for each in rounds)
    own = [rate(each.own) for each in rounds[1:]]
    other = [rate(each.other) for each in rounds[1:]]
    llama = [each.llama for each in rounds[1:]]
    known = [each for each in llama if each is not None]
    note = f"{median(own):.0f} / {median(known):.0f} tokens/s" if known else "no node-llama-cpp"
    return [
        LLAMA_CPP[streams].judge(list(map(ratio, own, llama)), errors=wrong, note=note),
        SERVER[streams].judge(
            list(map(ratio, own, other)),
            errors=wrong,
            note=f"{median(own):.0f} / {median(other):.0f} tokens/s",
        ),
    ]


async def _llama_rate(
    rig: Rig, file: Path, prompts: Sequence[Sequence[int]], tokens: int
) -> float | None:
    """Load it for this round alone: idle, its threads would still hold memory and caches."""
    if rig.llama_cpp is None:
        return None
    context = PROMPT_TOKENS + tokens
    async with llama_cpp(rig.llama_cpp, file, sequences=len(prompts), context=context) as llama:
        await llama.rate(prompts, 4)
        return await llama.rate(prompts, tokens)


def _bound(rounds: Sequence[Round], weights: int) -> Verdict:
    """Each token of one stream reads every weight once; nothing can be faster than memory is."""
    read = memory_bandwidth(weights)
    samples = [rate(each.own) / (read / weights) for each in rounds[1:]]
    note = f"{read / 1e9:.1f} GB/s, {weights / 1e6:.0f} MB: {read / weights:.0f} tokens/s"
    return BOUND.judge(samples, note=note)


def memory_bandwidth(size: int) -> float:
    """Measure the bytes a second at which all cores add up `size` bytes, the best of five."""
    parts = np.array_split(np.ones(size // 4, np.float32), os.cpu_count() or 1)

    def once() -> float:
        adders = [threading.Thread(target=part.sum) for part in parts]
        started = time.perf_counter()
        for each in adders:
            each.start()
        for each in adders:
            each.join()
        return size / (time.perf_counter() - started)

    return max(once() for _ in range(5))
