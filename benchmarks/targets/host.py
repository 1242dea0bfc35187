"""The processor's cost of a token beside the model's arithmetic, with next to no arithmetic.

The engine, with texts, beside mlx-lm's batch generator, which gives tokens alone; and the gateway
over HTTP beside that generator, in a process of its own, and beside mlx-lm's own server. A row says
what the generator itself loses to a process that takes a quarter of a core, as a client may.
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import yaml

from benchmarks import servers
from benchmarks.raw_client import Streamed, asks, stream_all
from benchmarks.targets.chatting import MLX_LM_NAME
from benchmarks.targets.rig import Rig, rest
from benchmarks.targets.verdicts import Target, Verdict, ratio

ROWS, LAYERS = (1, 8, 32, 128), (4, 28)
STREAMS, SERVED_LAYERS = (1, 8, 32), 4
STEPS, TOKENS = 100, 512
WARM_STEPS = 5
VOCABULARY = 1024  # choosing among more would be arithmetic
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
NAME = "host"
# Half a millisecond of work, then a rest of three times as long: a quarter of a core. An event loop
# and its client take about as much while eight streams run.
QUARTER = """
import time
while True:
    until = time.perf_counter() + 0.0005
    while time.perf_counter() < until:
        pass
    time.sleep(0.0015)
"""


@dataclass(frozen=True, slots=True)
class Round:
    """The seconds that a token took of ours and of the reference; None where there was none.
    `errors` are of our answers, `lost` of the reference's.
    """

    own: float | None
    other: float | None
    errors: int = 0
    lost: int = 0


class Pair:
    """A model in our engine and in mlx-lm's batch generator, on the thread that opens both."""

    def __init__(self, folder: Path) -> None:
        import mlx_lm

        from benchmarks.loading import load_generation
        from gateway.engine.device import choose_device, configure

        device = choose_device("auto")
        configure(device)
        self.engine = load_generation(folder, name=folder.name, device=device)
        loaded: Any = mlx_lm.load(str(folder))
        self._model = loaded[0]

    def own(self, prompts: Sequence[list[int]], steps: int) -> float:
        """Return the seconds that a token takes the engine, once all rows decode."""
        from gateway.jobs.chat import Sampling
        from gateway.jobs.steps import SequenceParams, StepPlan

        engine, sampling = self.engine, Sampling(temperature=0, ignore_eos=True)
        most = steps + WARM_STEPS + 2 * len(prompts)
        rows = [
            SequenceParams(prompt=prompt, max_tokens=most, sampling=sampling, is_bare=True)
            for prompt in prompts
        ]
        result = engine.step(StepPlan(joining=list(enumerate(rows))))
        while result.reading:
            result = engine.step(StepPlan(kind="prefill", token_budget=4096))
        decode = StepPlan(kind="decode")
        for _ in range(WARM_STEPS):
            engine.step(decode)
        started, tokens = time.perf_counter(), 0
        for _ in range(steps):
            tokens += sum(delta.tokens for delta in engine.step(decode).deltas)
        seconds = time.perf_counter() - started
        engine.step(StepPlan(leaving=range(len(rows))))
        assert tokens == steps * len(prompts)
        return seconds / tokens

    def other(self, prompts: Sequence[list[int]], steps: int) -> float:
        """Return the same of the batch generator."""
        from mlx_lm.generate import BatchGenerator

        rows = len(prompts)
        generator: Any = BatchGenerator(
            self._model,
            stop_tokens=[],
            completion_batch_size=max(rows, 32),
            prefill_batch_size=max(rows, 8),
        )
        try:
            generator.insert(list(prompts), [steps + WARM_STEPS + 2 * rows] * rows)
            while len(generator.next_generated()) < rows:
                pass
            for _ in range(WARM_STEPS):
                generator.next_generated()
            started, tokens = time.perf_counter(), 0
            for _ in range(steps):
                tokens += len(generator.next_generated())
            seconds = time.perf_counter() - started
        finally:
            generator.close()
        assert tokens == steps * rows
        return seconds / tokens

    def close(self) -> None:
        self.engine.close()


async def host(rig: Rig) -> list[Verdict]:
    """Both in-process, with rows of unequal lengths; then over HTTP. In turn, in each round."""
    verdicts = []
    for layers in LAYERS:
        verdicts += await _inside(rig, layers, write_model(rig.folder / f"{NAME}-{layers}", layers))
    return verdicts + await _over_http(rig, rig.folder / f"{NAME}-{SERVED_LAYERS}")


def write_model(folder: Path, layers: int) -> Path:
    """Write a chat model of this number of layers and next to no arithmetic."""
    from benchmarks.checkpoints import write_chat  # imports mlx

    return write_chat(folder, VOCABULARY, num_hidden_layers=layers, **SIZES)


async def _inside(rig: Rig, layers: int, folder: Path) -> list[Verdict]:
    pair, verdicts = Pair(folder), []
    steps = max(10, round(rig.seconds(STEPS)))
    for rows in ROWS:
        rounds = []
        for number in range(rig.rounds + 1):
            prompts = mixed_prompts(rows, number)
            own = pair.own(prompts, steps)
            await rest()
            rounds.append(Round(own, pair.other(prompts, steps)))
            await rest()
        work = f"model of {layers} layers and no arithmetic, tokens/s, rows: {rows}"
        verdicts.append(judged(f"{work}; engine with texts / BatchGenerator", rounds))
    pair.close()
    return verdicts


async def _over_http(rig: Rig, folder: Path) -> list[Verdict]:
    models = rig.folder / f"{NAME}.yaml"
    entry = {"kind": "chat", "source": f"path:{folder.name}", "preload": True}
    models.write_text(yaml.safe_dump({"version": 1, "models": {NAME: entry}}), encoding="utf-8")
    tokens, verdicts = max(32, round(rig.seconds(TOKENS))), []
    generator = (sys.executable, "-m", "benchmarks.batch_generator", folder, "--tuned")
    # Each token is a pass here: what a random model repeats would be read ahead.
    async with (
        servers.gateway(models, GATEWAY_SPECULATE_ROWS="0") as ours,
        servers.worker(*generator, folder=servers.CHECKOUT) as alone,
        servers.mlx_lm(folder) as theirs,
    ):
        for streams in STREAMS:
            beside_alone, beside_server, disturbed = [], [], []
            for number in range(rig.rounds + 1):
                prompts = [f"{number} " + "and so on " * (2 + row) for row in range(streams)]
                own = await asyncio.to_thread(stream_all, ours, asks(NAME, prompts, tokens))
                await rest()
                asked = {"prompts": prompts, "tokens": tokens}
                alone_s = 1 / float((await alone.ask(asked))["rate"])
                await rest()
                async with servers.worker(sys.executable, "-c", QUARTER):
                    disturbed.append(Round(1 / float((await alone.ask(asked))["rate"]), alone_s))
                await rest()
                named = asks(MLX_LM_NAME, prompts, tokens)
                other = await asyncio.to_thread(stream_all, theirs, named)
                await rest()
                beside_server.append(compared(own, other, tokens))
                wrong = beside_server[-1].errors
                beside_alone.append(Round(own.token_s, alone_s, wrong))
            work = (
                f"model of {SERVED_LAYERS} layers and no arithmetic, tokens/s, streams: {streams}"
            )
            verdicts.append(judged(f"{work}; HTTP / BatchGenerator alone", beside_alone))
            verdicts.append(judged(f"{work}; HTTP / mlx-lm's own server", beside_server))
            work += "; BatchGenerator beside a quarter of a core / alone"
            verdicts.append(judged(work, disturbed))
    return verdicts


def mixed_prompts(rows: int, seed: int) -> list[list[int]]:
    """Draw prompts of 20 tokens and more, each three longer than the one before."""
    draw = Random(seed)
    return [[draw.randrange(300, 1000) for _ in range(20 + 3 * row)] for row in range(rows)]


def compared(own: Streamed, other: Streamed, tokens: int) -> Round:
    """Compare the streams of both servers. An answer of another length is a wrong one."""
    wrong, lost = (sum(got != tokens for got in each.tokens) for each in (own, other))
    return Round(own.token_s, other.token_s, wrong, lost)


def judged(work: str, rounds: Sequence[Round]) -> Verdict:
    """Judge by all rounds but the first, in which each makes its shapes: its errors count."""
    pairs = [(each.own, each.other) for each in rounds[1:]]
    own, other = (
        median([seconds for seconds in side if seconds is not None] or [0.0])
        for side in zip(*pairs, strict=True)
    )
    note = f"{1e6 * own:.0f} / {1e6 * other:.0f} µs a token"
    if lost := sum(each.lost for each in rounds):
        note += f"; the other lost {lost} requests"
    # Tokens a second, as of the other targets: the more, the better.
    samples = [ratio(other, own) if own is not None else None for own, other in pairs]
    return Target(work).judge(samples, errors=sum(each.errors for each in rounds), note=note)
