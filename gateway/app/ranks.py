"""Runs this process as one rank of a group that mlx.launch started."""

import asyncio
import contextlib
import hashlib
import os
import signal
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gateway import logs
from gateway.app.loading import Engines
from gateway.app.named import load_served
from gateway.engine.models.sharding import RankGroup, RankShare, first_host, share_bytes
from gateway.errors import ModelLoadFailed
from gateway.registry import ChatSpec
from gateway.serving.ports import GenerationEngine
from gateway.serving.ranks.calls import Setup
from gateway.serving.ranks.following import follow
from gateway.serving.ranks.links import Follower, Invitation, Leader, accept, inviting
from gateway.settings import Settings, SettingsInvalid

log = logs.get("ranks")


class RankEngines(Engines, Protocol):
    """The `Engines` of one rank in a group."""

    async def generation(
        self, spec: ChatSpec, files: Path, led: Setup | None = None
    ) -> Generator[GenerationEngine | None]:
        """Load a chat model. `led` is rank 0's setup, which only the other ranks get."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """The group of ranks to which this process belongs."""

    group: RankGroup
    leader: Leader | None = None  # rank 0's connections; None on the other ranks

    def share(self, spec: ChatSpec) -> RankShare | None:
        """Return this rank's share of a model; None if the model is not split."""
        if spec.parallel is None:
            return None
        return RankShare(spec.parallel, self.group)

    def lost(self) -> str | None:
        """Return how a rank was lost; None while all ranks are connected."""
        return None if self.leader is None else self.leader.lost


@contextlib.contextmanager
def leading(group: RankGroup) -> Iterator[Ranks]:
    """Connect rank 0 to the other ranks, and end the group at exit. Raises SettingsInvalid."""
    host = first_host()
    if not host:
        problem = "this backend of mlx.launch does not say where rank 0 is: use ring, jaccl or nccl"
        share_bytes(group, b"")  # tells the other ranks, which wait, to exit
        raise SettingsInvalid([problem])
    with inviting(host) as (invitation, listener):
        share_bytes(group, invitation.encode())
        try:
            leader = accept(listener, invitation, range(1, group.size()))
        except TimeoutError as error:
            raise SettingsInvalid([str(error)]) from None
    log.info("group_formed", ranks=group.size(), host=host)
    try:
        yield Ranks(group, leader)
    finally:
        leader.close()


def follow_rank_0(settings: Settings, group: RankGroup, engines: RankEngines) -> None:
    """Make the engine calls that rank 0 sends. Raises SettingsInvalid."""
    invitation = share_bytes(group, b"")
    if not invitation:
        raise SettingsInvalid(["rank 0 did not start: see its log"])
    link = Follower.connect(Invitation.decode(invitation), group.rank())
    log.info("following", rank=group.rank(), ranks=group.size())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop(link))

    def load(model: str, setup: Setup) -> GenerationEngine:
        return asyncio.run(_load(settings, engines, model, setup))

    engines.begin()
    try:
        follow(link, load, engines.tidy)
    finally:
        engines.end()
    log.info("group_ended", rank=group.rank())


def describe(spec: ChatSpec) -> str:
    """Return a digest of the keys that affect loading, which must be equal on every rank."""
    said = sorted(spec.loaded_with().items())  # paths may differ between ranks
    return hashlib.sha256(repr(said).encode()).hexdigest()


async def _load(
    settings: Settings, engines: RankEngines, model: str, setup: Setup
) -> GenerationEngine:
    # Answers would be nonsense if the ranks had different models.
    spec = load_served(settings).by_id(model)  # models.yaml may have changed
    if not isinstance(spec, ChatSpec) or describe(spec) != setup.spec:
        raise ModelLoadFailed(model, "its models.yaml differs from that of rank 0")
    files: Path = await engines.files(spec)
    if await engines.digest(spec, files) != setup.files:
        reason = "its device, versions, memory or model files differ from those of rank 0"
        raise ModelLoadFailed(model, reason)
    steps = await engines.generation(spec, files, setup)
    return next(engine for engine in steps if engine is not None)


def _stop(link: Follower) -> Any:
    signals: list[int] = []

    def handle(number: int, _: object) -> None:
        if signals:  # the second signal: exit at once
            os._exit(1)
        signals.append(number)
        link.ask_to_stop()

    return handle
