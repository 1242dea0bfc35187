"""The gateway itself under the load of a simulation, beside the prediction for it."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.simulation.cluster import WARM_UP, Prediction, capacity, limits_of, predict
from benchmarks.simulation.load import Mix, Request
from benchmarks.simulation.measuring import CHAT, MINILM, TOKENS, Measured, workload
from gateway.bench.figures import Answer, Figures, Window, measure
from gateway.bench.load import Peer
from gateway.settings import Settings

SECONDS, SEED = 24.0, 7
LEAST_PER_S = 1.0
LOAD = 0.3  # part of the predicted maximum


@dataclass(frozen=True, slots=True)
class Point:
    """One run: its load, its prediction and its measurement."""

    name: str
    per_s: float
    predicted: Prediction
    measured: Mapping[bool, Figures]


async def check(measured: Measured, peer: Peer) -> list[Point]:
    """Run embeddings alone, then one chat in ten requests beside them."""
    limits = limits_of(Settings(_env_file=None))  # type: ignore[call-arg]
    tokens = {"text_tokens": measured.text_tokens, "prompt_tokens": measured.prompt_tokens}
    mixes = {
        "embeddings": Mix(chats=0, **tokens),
        "one chat in ten": Mix(chats=0.1, answer_tokens=TOKENS, **tokens),
    }
    points = []
    for name, mix in mixes.items():
        run = partial(
            predict, measured.device, mix, seconds=SECONDS, limits=limits, client=measured.client
        )
        per_s = round(LOAD * capacity(run, LEAST_PER_S), 1)
        predicted = run(per_s, seed=SEED)
        found = await open_loop(peer, list(mix.requests(per_s, SECONDS, SEED)))
        points.append(Point(name, per_s, predicted, found))
    return points


async def open_loop(peer: Peer, requests: Sequence[Request]) -> Mapping[bool, Figures]:
    """Send each request at its moment, however slow the answers; return the figures by kind.

    A request's time counts from the moment it was due, not from when the client got round to it.
    """
    answer_tokens = max((each.answer for each in requests), default=1)
    asks = {True: workload(CHAT, 8, tokens=max(1, answer_tokens)), False: workload(MINILM, 9)}
    for each in asks.values():
        await peer.ask(each.next())
    start = time.perf_counter() + 0.1
    answers: Mapping[bool, list[Answer]] = {True: [], False: []}

    async def ask(request: Request) -> None:
        answer = await peer.ask(asks[request.is_chat].next())
        answers[request.is_chat].append(replace(answer, started=start + request.arrived))

    async with asyncio.TaskGroup() as group:
        for request in requests:
            if (wait_s := start + request.arrived - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            group.create_task(ask(request))
    window = Window(start + WARM_UP * SECONDS, start + SECONDS)
    return {is_chat: measure(found, window) for is_chat, found in answers.items()}
