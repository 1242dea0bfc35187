"""A reranker of MiniLM's shape: many pairs a request, and calls at once, beside its own engine."""

from benchmarks.targets.rig import RERANKER, Rig, errors, rest
from benchmarks.targets.verdicts import Target, Verdict
from gateway.bench.figures import Answer, median
from gateway.bench.kinds import Kind
from gateway.bench.load import Load, burst, run_closed_loop

CLIENTS = 4  # so that one's answer is written while others' pairs are scored
PAIRS = (32, 64)
CALLS, CALL_PAIRS = 10, 10
TOGETHER = Target("10 concurrent calls of 10 pairs / 10 sequential (reranker), pairs/s")


def _many(pairs: int) -> Target:
    return Target(f"rerank, pairs/s at {pairs} pairs a request: HTTP / engine", 0.95)


async def reranking(rig: Rig) -> list[Verdict]:
    """Measure both sizes, and calls at once."""
    found = [await _rates(rig, pairs) for pairs in PAIRS]
    return [*found, await _together(rig)]


async def _rates(rig: Rig, pairs: int) -> Verdict:
    """Closed loop over HTTP, then the engine at a request's pairs or, if better, all clients'."""
    samples, wrong, rates = [], 0, []
    wording = rig.wording(RERANKER, texts=pairs, prompt_words=8)
    workload = wording.workload(Kind.RERANK)
    async with rig.engine(wording, Kind.RERANK) as engine, rig.gateway() as peer:
        for _ in range(rig.rounds):
            [figures] = await run_closed_loop(
                peer,
                [Load(workload, CLIENTS)],
                warmup_s=rig.seconds(1),
                duration_s=rig.seconds(5),
            )
            wrong += sum(figures.errors.values())
            await rest()
            inside = max(engine.rate(requests, rig.seconds(3)) for requests in (1, CLIENTS))
            await rest()
            samples.append(figures.units_per_s / inside)
            rates.append(inside)
    return _many(pairs).judge(samples, errors=wrong, note=f"the engine does {median(rates):.0f}/s")


async def _together(rig: Rig) -> Verdict:
    """Return what ten calls at once gain over ten in turn."""
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
