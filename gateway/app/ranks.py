"""This process as one rank of a group that mlx.launch started: rank 0 leads, the others follow."""

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
    """The engines of a rank: MlxEngines."""

    async def generation(
        self, spec: ChatSpec, files: Path, led: Setup | None = None
    ) -> Generator[GenerationEngine | None]:
        """Load as any `Engines` do. A rank that is `led` by rank 0 loads its own share."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """The group, and rank 0's connections to the others; None on a rank that follows."""

    group: RankGroup
    leader: Leader | None = None

    def share(self, spec: ChatSpec) -> RankShare | None:
        """Return this rank's share of a model; None if it is not divided."""
        if spec.parallel is None:
            return None
        return RankShare(spec.parallel, self.group)

    def lost(self) -> str | None:
        """Return the loss of a rank, in words; None while all are there."""
        return None if self.leader is None else self.leader.lost


@contextlib.contextmanager
def leading(group: RankGroup) -> Iterator[Ranks]:
    """Invite the other ranks, on rank 0, and end them at exit. Raises SettingsInvalid."""
    host = first_host()
    if not host:
        problem = "this backend of mlx.launch does not say where rank 0 is: use ring, jaccl or nccl"
        share_bytes(group, b"")  # the other ranks would wait for an invitation
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
    """Make rank 0's calls until it ends the group."""
    invitation = share_bytes(group, b"")
    if not invitation:
        raise SettingsInvalid(["rank 0 did not begin: see its log"])
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
    """Return a digest of the keys that a model is loaded with: the same on every rank."""
    said = sorted(spec.loaded_with().items())  # no paths, which may differ on each rank
    return hashlib.sha256(repr(said).encode()).hexdigest()


async def _load(
    settings: Settings, engines: RankEngines, model: str, setup: Setup
) -> GenerationEngine:
    """Load this rank's share of a model."""
    # Answers would be nonsense if this rank's model were not that of rank 0.
    spec = load_served(settings).by_id(model)  # models.yaml may have changed
    if not isinstance(spec, ChatSpec) or describe(spec) != setup.spec:
        raise ModelLoadFailed(model, "its models.yaml is not that of rank 0")
    files: Path = await engines.files(spec)
    if await engines.digest(spec, files) != setup.files:
        reason = "its device, versions, memory or files of the model are not those of rank 0"
        raise ModelLoadFailed(model, reason)
    steps = await engines.generation(spec, files, setup)
    return next(engine for engine in steps if engine is not None)


def _stop(link: Follower) -> Any:
    """Return a handler of signals: the first asks rank 0 to end the group."""
    signals: list[int] = []

    def handle(number: int, _: object) -> None:
        if signals:  # a second signal ends the process at once
            os._exit(1)
        signals.append(number)
        link.ask_to_stop()

    return handle
