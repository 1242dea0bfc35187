"""A reranker of MiniLM's shape, and a causal model that scores by labels.

The reranker: many pairs a request, and calls at once, beside its own engine. The causal model: with
and without the shared part of its prompts.
"""

import time
from statistics import median

import aiohttp
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.checkpoints import write_unpacked
from benchmarks.targets.rig import (
    RERANKER,
    SMOLLM2,
    SMOLLM2_GGUF,
    SMOLLM2_PACKAGE,
    Rig,
    errors,
    rest,
)
from benchmarks.targets.verdicts import Target, Verdict, not_measured, ratio
from benchmarks.workloads import burst
from gateway.bench.figures import Answer
from gateway.bench.load import Load, Peer, run_closed_loop
from gateway.bench.requests import Kind
from gateway.engine.device import Device, choose_device, configure, prepare_malloc
from gateway.engine.embedding.label_scorer import LabelScorer, load_label_scorer_in_steps
from gateway.jobs.rerank import Pair
from gateway.registry.sources import package_folder

CLIENTS = 4  # one's answer is written while others' pairs are scored
PAIRS = (32, 64)
CALLS, CALL_PAIRS = 10, 10
LABEL_PAIRS, LABEL_WORDS = 16, 99  # these words are 100 tokens of SmolLM2's, or 101
TOGETHER = Target("10 concurrent calls of 10 pairs / 10 sequential (reranker), pairs/s")
TOKENIZING = Target(f"rerank, {PAIRS[0]} pairs, one client: tokenizing / all stages", at_most=0.2)
SHARED = Target(
    f"label scoring (SmolLM2), {LABEL_PAIRS} documents of 100 tokens, in-process: "
    "prompt up to the document read once / every time, pairs/s",
    1.5,
)


def _many(pairs: int) -> Target:
    return Target(f"rerank, pairs/s at {pairs} pairs a request: HTTP / engine", 0.95)


async def reranking(rig: Rig) -> list[Verdict]:
    """Measure both sizes, the share of tokenizing, and calls at once."""
    found = [await _rates(rig, pairs) for pairs in PAIRS]
    return [*found, await _tokenizing(rig), await _together(rig)]


async def labels(rig: Rig) -> list[Verdict]:
    """Score by Qwen3-Reranker's recipe on SmolLM2's weights, in one padded batch either way.

    The tokens before a pair's `second` are read once for all pairs of a query; where it is 0 the
    engine takes nothing for shared, and reads every prompt from its first token.
    """
    package = package_folder(SMOLLM2_PACKAGE)
    if package is None:
        return [not_measured(SHARED.work, f"{SMOLLM2_PACKAGE} is not installed")]
    device = choose_device("auto")
    if device is Device.CPU:
        prepare_malloc()
    configure(device)
    folder = rig.folder / "labels"
    write_unpacked(package / SMOLLM2_GGUF, folder)
    engine = next(filter(None, load_label_scorer_in_steps(folder, name=SMOLLM2, device=device)))
    try:
        return [_sharing(rig, engine)]
    finally:
        engine.close()


def _sharing(rig: Rig, engine: LabelScorer) -> Verdict:
    """Time both on the same pairs; scores that differ are errors. The first round is a warm-up."""
    samples, wrong, rates = [], 0, []
    for _ in range(rig.rounds + 1):
        wording = rig.wording(SMOLLM2, texts=LABEL_PAIRS, words=LABEL_WORDS, prompt_words=8)
        pairs = engine.encode_pairs(wording.prompts[0], wording.inputs(0))
        started = time.perf_counter()
        once = engine.score(pairs)
        between = time.perf_counter()
        every_time = engine.score([Pair(pair.ids, 0, pair.cut) for pair in pairs])
        once_s, every_s = between - started, time.perf_counter() - between
        wrong += int((np.abs(once - every_time) > 1e-3).sum())
        samples.append(every_s / once_s)
        rates.append(len(pairs) / once_s)
    note = f"{median(rates[1:]):.1f}/s; {pairs[0].second} of {len(pairs[0])} tokens shared"
    return SHARED.judge(samples[1:], errors=wrong, note=note)


async def _rates(rig: Rig, pairs: int) -> Verdict:
    """Closed loop over HTTP, then the engine at a request's pairs and at all clients'.

    The better of the two counts, by its median: the better of each round would be luck too.
    """
    wrong, over_http = 0, []
    inside: dict[int, list[float]] = {1: [], CLIENTS: []}
    wording = rig.wording(RERANKER, texts=pairs, prompt_words=8)
    workload = wording.workload(Kind.RERANK)
    async with rig.engine(wording) as engine, rig.gateway() as peer:
        for _ in range(rig.rounds):
            [figures] = await run_closed_loop(
                peer,
                [Load(workload, CLIENTS)],
                warmup_s=rig.seconds(1),
                duration_s=rig.seconds(5),
            )
            wrong += sum(figures.errors.values())
            await rest()
            over_http.append(figures.units_per_s)
            for requests, rates in inside.items():
                rates.append(engine.rate(requests, rig.seconds(3)))
            await rest()
    best = max(inside.values(), key=median)
    note = f"{median(over_http):.0f} / {median(best):.0f} pairs/s"
    return _many(pairs).judge(list(map(ratio, over_http, best)), errors=wrong, note=note)


async def _tokenizing(rig: Rig) -> Verdict:
    """Ask in turn, so that no wait for other requests is in the sum that the share is of."""
    samples, wrong, spent = [], 0, []
    workload = rig.wording(RERANKER, texts=PAIRS[0], prompt_words=8).workload(Kind.RERANK)
    requests = max(5, round(rig.seconds(20)))
    async with rig.gateway() as peer:
        await peer.ask(workload.next())
        for _ in range(rig.rounds):
            before = await _stages(peer)
            answers = [await peer.ask(workload.next()) for _ in range(requests)]
            after = await _stages(peer)
            wrong += errors(answers)
            tokenizing = after["tokenise"] - before["tokenise"]
            every = sum(after.values()) - sum(before.values())
            samples.append(ratio(tokenizing, every))
            spent.append((tokenizing / requests, every / requests))
    medians = [1e3 * median(each) for each in zip(*spent, strict=True)]
    note = "{:.1f} of {:.0f} ms".format(*medians)
    return TOKENIZING.judge(samples, errors=wrong, note=note)


async def _stages(peer: Peer) -> dict[str, float]:
    """Return the seconds of each stage of all the reranker's requests, as /metrics has them."""
    url = peer.url.removesuffix("/v1") + "/metrics"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        families = text_string_to_metric_families(await response.text())
    return {
        sample.labels["stage"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == "gateway_stage_seconds_sum" and sample.labels["model"] == RERANKER
    }


async def _together(rig: Rig) -> Verdict:
    """Return the gain of ten calls at once over ten in turn."""
    samples, wrong = [], 0
    workload = rig.wording(RERANKER, texts=CALL_PAIRS, prompt_words=8).workload(Kind.RERANK)
    async with rig.gateway() as peer:
        await burst(peer, workload, CALLS)
        for _ in range(max(3, round(rig.rounds * rig.seconds(3)))):
            in_turn = [await peer.ask(workload.next()) for _ in range(CALLS)]
            at_once = await burst(peer, workload, CALLS)
            wrong += errors(in_turn) + errors(at_once)
            samples.append(sum(each.seconds for each in in_turn) / _span(at_once))
    return TOGETHER.judge(samples, errors=wrong)


def _span(answers: list[Answer]) -> float:
    return max(each.ended for each in answers) - min(each.started for each in answers)
