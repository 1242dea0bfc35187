"""Chat tokens a second: the gateway, mlx-lm's batch generator in-process, mlx-lm's server."""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from benchmarks.batch_generator import BatchReference
from benchmarks.raw_client import asks, stream_all
from benchmarks.servers import CHECKOUT, worker
from benchmarks.targets.rig import CHAT, Rig, errors, rate, rest
from benchmarks.targets.verdicts import Target, Verdict, ratio
from benchmarks.workloads import burst
from gateway.bench.figures import Answer
from gateway.bench.requests import Kind

TOKENS, FEW_TOKENS = 96, 32
INSIDE = {
    streams: Target(f"chat tokens/s, streams: {streams}; HTTP / BatchGenerator in-process", least)
    for streams, least in ((1, 1.1), (8, 1.25), (32, 1.25))
}
SERVER = {
    streams: Target(f"chat tokens/s, streams: {streams}; HTTP / mlx-lm's own server", least)
    for streams, least in ((1, 1.2), (8, 1.3), (32, 1.5))
}
AS_IT_COMES = {
    streams: Target(f"chat tokens/s, streams: {streams}; HTTP / BatchGenerator on mlx's own BLAS")
    for streams in INSIDE
}
SAMPLED = {
    streams: Target(f"sampled tokens/s, streams: {streams}; HTTP / BatchGenerator alone", least)
    for streams, least in ((1, 1.0), (8, 1.1), (32, None))
}
MLX_LM_NAME = "default_model"  # what its server calls the one it was started with


@dataclass(frozen=True, slots=True)
class Round:
    """The answers of both servers to the same prompts, and tokens/s of the batch generator."""

    own: Sequence[Answer]
    inside: float
    other: Sequence[Answer]


async def chat(rig: Rig) -> list[Verdict]:
    """A number of streams begin at once and are as long; all three in turn, in each round.

    Each of the three answers the same prompts, greedily, with as many tokens; the servers stream
    them.
    """
    tokens = max(16, round(rig.seconds(TOKENS)))
    verdicts = []
    inside = BatchReference.tuned(rig.folder / CHAT)
    async with rig.gateway() as ours, rig.mlx_lm() as theirs:
        for streams in INSIDE:
            rounds = []
            for _ in range(rig.rounds + 1):
                wording = rig.wording(CHAT, max_tokens=tokens)
                own = await burst(ours, wording.workload(Kind.CHAT), streams)
                await rest()
                reference = inside.rate([wording.prompts[n] for n in range(streams)], tokens)
                await rest()
                named = replace(wording, model=MLX_LM_NAME)
                other = await burst(theirs, named.workload(Kind.CHAT), streams)
                await rest()
                rounds.append(Round(own, reference, other))
            verdicts += judged(streams, rounds)
    return verdicts


async def as_it_comes(rig: Rig) -> list[Verdict]:
    """The same beside mlx-lm's generator in a process that was given no BLAS: fewer tokens, as it
    would take minutes on a CPU of Linux. On macOS it is the same as in `chat`.
    """
    tokens = max(8, round(rig.seconds(FEW_TOKENS)))
    verdicts = []
    generator = (sys.executable, "-m", "benchmarks.batch_generator", rig.folder / CHAT)
    async with rig.gateway() as ours, worker(*generator, folder=CHECKOUT) as theirs:
        for streams, target in AS_IT_COMES.items():
            own, other, wrong = [], [], 0
            for _ in range(rig.rounds + 1):
                wording = rig.wording(CHAT, max_tokens=tokens)
                answers = await burst(ours, wording.workload(Kind.CHAT), streams)
                await rest()
                prompts = [wording.prompts[n] for n in range(streams)]
                asked = await theirs.ask({"prompts": prompts, "tokens": tokens})
                await rest()
                own.append(rate(answers))
                other.append(float(asked["rate"]))
                wrong += errors(answers)
            note = f"{median(own[1:]):.0f} / {median(other[1:]):.0f} tokens/s; {tokens} tokens each"
            ratios = list(map(ratio, own[1:], other[1:]))
            verdicts.append(target.judge(ratios, errors=wrong, note=note))
    return verdicts


async def sampled(rig: Rig) -> list[Verdict]:
    """Text drawn at temperature 1, which repeats little that could be read ahead, beside the
    generator in a process of its own.
    """
    tokens, verdicts = max(16, round(rig.seconds(TOKENS))), []
    generator = (sys.executable, "-m", "benchmarks.batch_generator", rig.folder / CHAT, "--tuned")
    async with rig.gateway() as ours, worker(*generator, folder=CHECKOUT) as alone:
        for streams, target in SAMPLED.items():
            own, other, wrong = [], [], 0
            for _ in range(rig.rounds + 1):
                wording = rig.wording(CHAT, max_tokens=tokens)
                prompts = [wording.prompts[n] for n in range(streams)]
                bodies = asks(CHAT, prompts, tokens, temperature=1)
                streamed = await asyncio.to_thread(stream_all, ours.url, bodies)
                await rest()
                asked = {"prompts": prompts, "tokens": tokens, "temperature": 1}
                other.append(float((await alone.ask(asked))["rate"]))
                await rest()
                own.append(0.0 if streamed.token_s is None else 1 / streamed.token_s)
                wrong += streamed.tokens.count(None)
            note = f"{median(own[1:]):.0f} / {median(other[1:]):.0f} tokens/s"
            ratios = list(map(ratio, own[1:], other[1:]))
            verdicts.append(target.judge(ratios, errors=wrong, note=note))
    return verdicts


def judged(streams: int, rounds: Sequence[Round]) -> list[Verdict]:
    """Judge both targets.

    In the first round each of the three makes its shapes: its rates don't count, its errors do.
    Requests that mlx-lm's server loses are told; where it answered nothing there is no comparison.
    """
    wrong = sum(errors(each.own) for each in rounds)
    lost = sum(errors(each.other) for each in rounds)
    rates = [(rate(each.own), each.inside, rate(each.other)) for each in rounds[1:]]
    own, inside, other = sorted(rates)[len(rates) // 2]
    told = f"{own:.0f} / {other:.0f} tokens/s"
    if lost:
        told += f"; it lost {lost} of {streams * len(rounds)} requests"
    return [
        INSIDE[streams].judge(
            [ratio(own, inside) for own, inside, _ in rates],
            errors=wrong,
            note=f"{own:.0f} / {inside:.0f} tokens/s",
        ),
        SERVER[streams].judge(
            [ratio(own, other) for own, _, other in rates], errors=wrong, note=told
        ),
    ]
