"""Replicas behind a balancer that picks the least busy, and the predictions of a run."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.simulation.device import Client, Device
from benchmarks.simulation.load import Mix, Request
from benchmarks.simulation.replica import Events, Limits, Python, Replica
from gateway.app.limits import embedding_limits, generation_limits
from gateway.bench.figures import Answer, Figures, Window, measure
from gateway.registry import ChatSpec, EmbeddingSpec
from gateway.settings import Settings

WARM_UP = 0.25  # part of a run that is not counted
REFUSED = "429"
KEEPS_UP = 0.97  # part of the asked rate; a run ends with some requests under way
STEP = 1.05  # two rates this close are one


def limits_of(settings: Settings) -> Limits:
    """Return the bounds of a gateway with these settings."""
    plain, context = {"id": "none", "source": "package:of/none"}, {"folder": Path()}
    embedding = EmbeddingSpec.model_validate({"kind": "embedding", **plain}, context=context)
    chat = ChatSpec.model_validate({"kind": "chat", **plain}, context=context)
    return Limits(
        embedding=embedding_limits(settings, embedding),
        generation=generation_limits(settings, chat),
        weights={
            "embedding": settings.lane_weight_embedding,
            "prefill": settings.lane_weight_prefill,
            "decode": settings.lane_weight_decode,
        },
    )


@dataclass(frozen=True, slots=True)
class Prediction:
    """The figures of embeddings and of chats, and the requests that came in the window."""

    embeddings: Figures
    chats: Figures
    offered_per_s: float

    @property
    def requests_per_s(self) -> float:
        """Return the answers a second, of both kinds."""
        return self.embeddings.requests_per_s + self.chats.requests_per_s

    @property
    def refused(self) -> int:
        """Return how many requests found the queue full, over the whole run."""
        return sum(sum(each.errors.values()) for each in (self.embeddings, self.chats))

    @property
    def keeps_up(self) -> bool:
        """Return True if requests are answered as fast as they come."""
        return not self.refused and self.requests_per_s >= KEEPS_UP * self.offered_per_s


def simulate(
    device: Device,
    requests: Iterable[Request],
    window: Window,
    *,
    replicas: int = 1,
    limits: Limits,
    client: Client | None = None,
    answered: Callable[[float], None] = lambda _: None,
) -> Prediction:
    """Serve requests, in order of arrival, to the end; count those that end in the window.

    `answered` is called with the seconds that each took.

    A `client` shares the cores of the only replica: it is for checks on one machine.
    """
    events = Events()
    answers: Mapping[bool, list[Answer]] = {True: [], False: []}
    costs = client or Client()
    clients = Python(events)

    def receive(request: Request) -> None:
        seconds = costs.request_s / 2 + costs.token_s * request.answer
        clients.do(seconds, lambda: note(request))

    def note(request: Request) -> None:
        arrivals = () if request.first is None else (request.first, events.now)
        units = request.answer or 1
        request.ended = events.now
        answered(events.now - request.arrived)
        answer = Answer(request.arrived, events.now, arrivals, units)
        answers[request.is_chat].append(answer)

    gateways = [
        Replica(events, device, limits, receive, clients if client is not None else None)
        for _ in range(replicas)
    ]
    offered = turn = 0

    def route(request: Request) -> None:
        nonlocal turn
        order = gateways[turn:] + gateways[:turn] if replicas > 1 else gateways
        turn = (turn + 1) % replicas
        if not min(order, key=lambda each: each.in_flight).offer(request):
            refused = Answer(request.arrived, events.now, error=REFUSED)
            answers[request.is_chat].append(refused)

    coming = iter(requests)

    def arrive(request: Request) -> None:
        nonlocal offered
        offered += request.arrived in window
        clients.do(costs.request_s / 2, lambda: route(request))
        ask_next()

    def ask_next() -> None:
        if (request := next(coming, None)) is not None:
            events.at(request.arrived, lambda: arrive(request))

    ask_next()
    events.run()
    embeddings, chats = (measure(answers[is_chat], window) for is_chat in (False, True))
    return Prediction(embeddings, chats, offered / window.seconds)


def predict(
    device: Device,
    mix: Mix,
    per_s: float,
    *,
    seconds: float,
    limits: Limits,
    replicas: int = 1,
    client: Client | None = None,
    seed: int = 1,
) -> Prediction:
    """Predict one run of `seconds`, of which the first quarter is warm-up."""
    window = Window(WARM_UP * seconds, seconds)
    requests = mix.requests(per_s, seconds, seed)
    return simulate(device, requests, window, replicas=replicas, limits=limits, client=client)


def capacity(answered_at: Callable[[float], Prediction], low: float = 0.01) -> float:
    """Return the most requests a second that are still answered as fast as they come."""
    if not answered_at(low).keeps_up:
        return 0.0
    high = 2 * low
    while answered_at(high).keeps_up:
        low, high = high, 2 * high
    while high > STEP * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if answered_at(middle).keeps_up else (low, middle)
    return low
