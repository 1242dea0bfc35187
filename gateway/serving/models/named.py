"""Serves models that models.yaml does not list, if callers name their repositories on the hub."""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from gateway.errors import (
    GatewayError,
    InsufficientDisk,
    InsufficientMemory,
    ModelNotFound,
    Overloaded,
)
from gateway.logs import human_bytes
from gateway.registry import ModelSpec
from gateway.serving.models.cache import ModelCache
from gateway.serving.models.entry import Failures, shared
from gateway.serving.models.pulls import ADMIN, Pull, Pulls
from gateway.serving.models.served import Served

MOST_NAMED: Final = 16
MOST_REFUSED: Final = 256
RETRY_S: Final = 5.0
_PART = r"\w(?:[\w.-]{0,94}\w)?"
_REPO = re.compile(rf"(?:hub:)?({_PART}/{_PART}(?<!\.git))", re.ASCII)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model on the hub, and sizes in bytes."""

    spec: ModelSpec
    weights: int
    missing: int  # files that are not on the disk yet
    whole: int  # all files
    free: int  # free space on the disk


class Offers(Protocol):
    """The interface for looking up models on a hub."""

    async def offer(self, repo: str, is_pull: bool) -> Candidate:
        """Look up a model, which must be public unless `is_pull`. Raises a GatewayError."""


def repository(name: str) -> str | None:
    """Return the `org/name` in a model's name, or None if no repository can have that name."""
    match = _REPO.fullmatch(name)
    if match is None or ".." in name or "--" in name:
        return None
    return match[1]


def check_sizes(candidate: Candidate, *, pending: int, memory: int, reserve: int) -> None:
    """Raise InsufficientMemory or InsufficientDisk if a model is too large to be downloaded.

    Other downloads need `pending` bytes, and `reserve` bytes must stay free.
    """
    model, missing, free = candidate.spec.id, candidate.missing, candidate.free
    if candidate.weights > memory:
        weights, room = map(human_bytes, (candidate.weights, memory))
        raise InsufficientMemory(model, f"its files are {weights}, and models may hold {room}.")
    if missing and free - pending - missing < reserve:
        needed, there, kept = map(human_bytes, (missing + pending, free, reserve))
        reason = f"{needed} are missing, the disk has {there} free, and {kept} must stay free."
        raise InsufficientDisk(model, reason)


@dataclass(slots=True, kw_only=True, eq=False)
class NamedModels:
    """The served models that callers have named, at most MOST_NAMED."""

    served: Served
    models: ModelCache[Any]
    hub: Offers
    pulls: Pulls
    patterns: Sequence[str]
    memory_bytes: int
    reserve_bytes: int
    # Running lookups by repository, each with the id of the API key that asked for it.
    _looks: dict[str, tuple[str, asyncio.Task[ModelSpec]]] = field(default_factory=dict)
    _refusals: Failures = field(default_factory=Failures)

    def is_new(self, name: str) -> bool:
        """Return True for a name that may be a model on the hub and is not served yet."""
        repo = repository(name)
        return bool(self.patterns) and repo is not None and self._known(name, repo) is None

    def _known(self, *names: str | None) -> str | None:
        known = self.served.catalog.names()
        return next((name for name in names if name in known), None)

    async def admit(self, name: str, key: str) -> None:
        """Serve a model that a request names, if it matches `patterns`, and begin its download.

        Raises ModelNotFound if no pattern matches, Overloaded while this key waits for another
        model, and the errors of `Offers.offer` and `check_sizes`.
        """
        repo = repository(name)
        if repo is None or not self.is_new(name):
            return  # the model is served already, or the request gets the ordinary 404
        if not any(fnmatchcase(repo, pattern) for pattern in self.patterns):
            raise ModelNotFound(name, patterns=self.patterns)
        self._refusals.check(repo)
        looks = [asked for asked, (owner, _) in self._looks.items() if owner == key]
        pulls = [pull.spec.id for pull in self.pulls.under_way if pull.key == key]
        for other in {*looks, *self.served.named.keys() & pulls} - {repo}:
            message = f"`{other}` is being downloaded for this key. Try again once it is there."
            raise Overloaded(message, retry_after_s=RETRY_S)
        await self._add(repo, key)

    async def pull(self, name: str) -> Pull:
        """Begin or join an admin's pull of any model. Raises the errors of `admit`."""
        repo = repository(name)
        known = self._known(name, repo)
        if known is None and repo is not None:
            return self.pulls.begin(await self._add(repo, ADMIN), ADMIN)
        return self.pulls.begin(self.served.catalog.resolve(known or name).spec, ADMIN)

    async def _add(self, repo: str, key: str) -> ModelSpec:
        if repo not in self._looks:
            self._looks[repo] = (key, asyncio.create_task(self._look(repo, key)))
        return await shared(self._looks[repo][1])

    async def _look(self, repo: str, key: str) -> ModelSpec:
        try:
            candidate = await self.hub.offer(repo, key == ADMIN)
        except GatewayError as error:
            if key != ADMIN:
                self._refuse(repo, error)
            raise
        finally:
            del self._looks[repo]
        check_sizes(
            candidate,
            pending=self.pulls.pending,
            memory=self.memory_bytes,
            reserve=self.reserve_bytes,
        )
        self._make_place()
        self.served.named[repo] = candidate.spec
        self._publish()
        pull = self.pulls.begin(candidate.spec, key, candidate.whole)
        pull.task.add_done_callback(partial(self._settle, repo))
        return candidate.spec

    def _refuse(self, repo: str, error: GatewayError) -> None:
        if len(self._refusals.models()) >= MOST_REFUSED:
            self._refusals.clear()
        self._refusals.remember(repo, error)

    def _make_place(self) -> None:
        """Drop an idle model if MOST_NAMED are served. Raises Overloaded if none is idle."""
        if len(self.served.named) < MOST_NAMED:
            return
        used = {model for model, state in self.models.states().items() if state != "failed"}
        used.update(pull.spec.id for pull in self.pulls.under_way)
        idle = next((repo for repo in self.served.named if repo not in used), None)
        if idle is None:
            message = f"{MOST_NAMED} models have been named, and all are in use."
            raise Overloaded(message, retry_after_s=RETRY_S)
        del self.served.named[idle]

    def _settle(self, repo: str, task: asyncio.Task[Path]) -> None:
        """Drop a model whose download failed, so that the next request looks it up again."""
        if task.cancelled() or task.exception() is not None:
            self.served.named.pop(repo, None)
            self._publish()

    def _publish(self) -> None:
        self.served.publish()
        self.models.forget()
