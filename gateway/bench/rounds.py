"""One concurrency after another: the load first, then the engine while the server rests."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.bench.figures import Figures
from gateway.bench.kinds import Kind
from gateway.bench.load import Load, Peer, Told, closed_loop
from gateway.bench.workloads import Workload

if TYPE_CHECKING:  # it imports mlx
    from gateway.bench.engine import Best, Reference


@dataclass(frozen=True, slots=True)
class Line:
    """What so many clients of one kind got. `engine` is units a second without the gateway."""

    kind: Kind
    unit: str
    clients: int
    figures: Figures
    engine: float | None = None
    best: "Best | None" = None


class FirstAskFailed(Exception):
    """The server does not do this work at all: its text says what it answered."""


async def rounds(
    peer: Peer,
    workloads: Mapping[Kind, Workload],
    concurrency: Sequence[int],
    *,
    warmup_s: float,
    duration_s: float,
    reference: "Reference | None" = None,
    told: Told = lambda _: None,
) -> AsyncIterator[Line]:
    """Measure each number of clients in its turn; mixed work has that many of each kind.

    One request of each kind comes first, so that loading a model is not measured. After the
    engine, connections are new: while it runs nobody sees a server close the idle ones. Raises
    FirstAskFailed.
    """
    for kind, workload in workloads.items():
        answer = await peer.ask(workload.next())
        if answer.error is not None:
            raise FirstAskFailed(f"The first request ({kind}) failed: {answer.error}.")
    best = None
    if reference is not None:
        best = reference.best(duration_s)
        await peer.reconnect()
    for clients in concurrency:
        loads = [Load(workload, clients) for workload in workloads.values()]
        measured = await closed_loop(
            peer, loads, warmup_s=warmup_s, duration_s=duration_s, told=told
        )
        rate = None
        if reference is not None:
            rate = reference.rate(clients, duration_s)
            await peer.reconnect()
        for (kind, workload), figures in zip(workloads.items(), measured, strict=True):
            yield Line(kind, workload.unit, clients, figures, rate, best)
