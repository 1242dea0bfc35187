"""Downloads one at a time; models that callers name, each counted to its key."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import pytest

from gateway import clock, metrics
from gateway.errors import (
    GatewayError,
    InsufficientDisk,
    InsufficientMemory,
    ModelNotFound,
    ModelRefused,
    ModelUnavailable,
    Overloaded,
    Unavailable,
)
from gateway.registry import Catalog, ChatSpec, HubSource, ModelSpec
from gateway.serving.budget import Budget
from gateway.serving.models.cache import ModelCache
from gateway.serving.models.entry import UNAVAILABLE_S
from gateway.serving.models.named import (
    MOST_NAMED,
    MOST_REFUSED,
    Candidate,
    NamedModels,
    check_sizes,
    repository,
)
from gateway.serving.models.pulls import Fetched, Pulls
from gateway.serving.models.served import Served
from tests.serving.models.harness import Shelf

pytestmark = pytest.mark.anyio
GB = 1_000_000_000


def spec(name: str) -> ChatSpec:
    return ChatSpec(id=name, kind="chat", source=HubSource(name))


class ScriptedStore:
    """A hub whose downloads end once `may_end` is set; those that `fail` do so with that."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.here: set[str] = set()
        self.failing: dict[str, GatewayError] = {}
        self.may_end = asyncio.Event()
        self.begun = asyncio.Event()
        self.most = self.now = 0
        self.fetched_bytes = 40

    async def find(self, spec: ModelSpec) -> Path | None:
        return Path(spec.id) if spec.id in self.here else None

    async def files(self, spec: ModelSpec, *, is_pull: bool = False) -> Path:
        self.asked.append(spec.id)
        self.now += 1
        self.most = max(self.most, self.now)
        self.begun.set()
        try:
            await self.may_end.wait()
        finally:
            self.now -= 1
        if spec.id in self.failing:
            raise self.failing[spec.id]
        self.here.add(spec.id)
        return Path(spec.id)

    def fetched(self, spec: ModelSpec) -> Fetched:
        return Fetched(100 if spec.id in self.here else self.fetched_bytes, 100)


@pytest.fixture
def store() -> ScriptedStore:
    return ScriptedStore()


@pytest.fixture
async def pulls(store: ScriptedStore) -> AsyncIterator[Pulls]:
    async with Pulls(store) as pulls:
        yield pulls


class ScriptedCache(ModelCache[str]):
    """Reports the states it is told to; keeps the names that were served at its last look."""

    told: Mapping[str, str] = MappingProxyType({})
    seen: frozenset[str] = frozenset()

    def states(self) -> dict[str, str]:
        return dict(self.told)

    def forget(self) -> None:
        self.seen = frozenset(self._served.catalog.names())


class Callers:
    """Names that a gateway with one model of its own may be asked for, and its hub."""

    def __init__(self, pulls: Pulls, *patterns: str) -> None:
        self.served = Served(Catalog([spec("org/own")]))
        budget = Budget(2 * GB)
        self.models = ScriptedCache(Shelf(), self.served, budget, max_models=1, load_wait_s=1)
        self.offered: list[str] = []
        self.refusal: GatewayError | None = None
        self.named = NamedModels(
            served=self.served,
            models=self.models,
            hub=self,
            pulls=pulls,
            patterns=patterns,
            memory_bytes=2 * GB,
            reserve_bytes=GB,
        )

    async def offer(self, repo: str, is_pull: bool) -> Candidate:
        self.offered.append(repo)
        await asyncio.sleep(0)
        if self.refusal is not None:
            raise self.refusal
        return Candidate(spec(repo), weights=GB, missing=GB, whole=GB + 40, free=int(3.5 * GB))


@contextmanager
def refused(code: str) -> Iterator[None]:
    with pytest.raises(GatewayError) as caught:
        yield
    assert caught.value.code == code


async def test_one_model_is_downloaded_at_a_time(pulls: Pulls, store: ScriptedStore) -> None:
    first, second = (
        asyncio.ensure_future(pulls.begin(spec(name)).wait()) for name in ("o/a", "o/b")
    )
    await store.begun.wait()
    assert [pull.status for pull in pulls.under_way] == ["downloading", "waiting"]
    assert pulls.percent(spec("o/a")) == 40
    store.may_end.set()
    assert [await first, await second] == [Path("o/a"), Path("o/b")]
    assert store.most == 1
    assert not pulls.under_way


async def test_what_is_on_disk_waits_for_no_download(pulls: Pulls, store: ScriptedStore) -> None:
    store.here.add("o/here")
    pulls.begin(spec("o/far"))
    assert await pulls.begin(spec("o/here")).wait() == Path("o/here")


async def test_a_download_goes_on_when_a_caller_leaves_and_fails_all_that_wait(
    pulls: Pulls, store: ScriptedStore
) -> None:
    store.failing["o/a"] = ModelUnavailable("o/a", "gone.")
    left, stayed, late = (asyncio.ensure_future(pulls.begin(spec("o/a")).wait()) for _ in range(3))
    await store.begun.wait()
    left.cancel()
    store.may_end.set()
    for caller in (stayed, late):
        with pytest.raises(ModelUnavailable):
            await caller
    assert store.asked == ["o/a"]
    store.failing.clear()
    assert await pulls.begin(spec("o/a")).wait() == Path("o/a")


async def test_a_shutdown_ends_downloads_and_tells_who_waits(store: ScriptedStore) -> None:
    async with Pulls(store) as pulls:
        waiting = asyncio.ensure_future(pulls.begin(spec("o/a")).wait())
        await store.begun.wait()
    with pytest.raises(Unavailable, match="shutting down"):
        await waiting


async def test_bytes_are_counted_to_the_key(pulls: Pulls, store: ScriptedStore) -> None:
    counted = metrics.of(metrics.PULLED_BYTES, "key-7")
    before = counted._value.get()
    store.may_end.set()
    await pulls.begin(spec("o/counted"), "key-7").wait()
    assert counted._value.get() - before == 60


@pytest.mark.parametrize(
    "name",
    [
        *("org", "org/", "/name", "org/name/more", "org\\name", "../name", "org/..", "o..g/name"),
        *("org/name@main", "org/n\u0430me", " org/name", "org/name\n", "hub:hub:org/name", ".o/n"),
        *("org/n--m", "org/name.git", "org/name.", "org/-name", "o-/name", f"org/{'x' * 97}"),
    ],
)
def test_a_name_that_is_no_repository_is_none(name: str) -> None:
    assert repository(name) is None


def test_a_repository_may_be_named_with_its_hub() -> None:
    assert repository("hub:org/name-4.5_b") == repository("org/name-4.5_b") == "org/name-4.5_b"
    assert repository("o/n.github.io") == "o/n.github.io"


@pytest.mark.parametrize(
    ("weights", "missing", "pending", "error"),
    [
        (11, 0, 0, InsufficientMemory),
        (10, 70, 0, None),
        (10, 71, 0, InsufficientDisk),
        (10, 40, 31, InsufficientDisk),
        (10, 0, 99, None),
    ],
)
def test_sizes_are_refused_beyond_memory_and_disk(
    weights: int, missing: int, pending: int, error: type[GatewayError] | None
) -> None:
    candidate = Candidate(spec("o/a"), weights, missing, whole=missing, free=100)
    if error is None:
        check_sizes(candidate, pending=pending, memory=10, reserve=30)
        return
    with pytest.raises(error, match="o/a"):
        check_sizes(candidate, pending=pending, memory=10, reserve=30)


async def test_only_what_matches_a_pattern_is_asked_for(pulls: Pulls) -> None:
    callers = Callers(pulls)
    await callers.named.admit("org/new", "key-1")
    assert not callers.offered
    callers = Callers(pulls, "org/*", "other/one")
    for name in ("org/own", "hub:org/own", "gpt-4", "org/..", "org/a/b"):
        await callers.named.admit(name, "key-1")  # it is there, or gets the ordinary 404
    with pytest.raises(ModelNotFound, match=r"may be named here: org/\*, other/one"):
        await callers.named.admit("other/two", "key-1")
    assert not callers.offered


async def test_two_that_name_a_model_ask_once(pulls: Pulls, store: ScriptedStore) -> None:
    callers = Callers(pulls, "org/*")
    names = [("org/new", "key-1"), ("hub:org/new", "key-2"), ("org/new", "key-1")]
    await asyncio.gather(*(callers.named.admit(*name) for name in names))
    await store.begun.wait()
    assert callers.offered == store.asked == ["org/new"]
    assert [pull.key for pull in pulls.under_way] == ["key-1"]


async def test_a_key_has_one_model_on_its_way(pulls: Pulls, store: ScriptedStore) -> None:
    callers = Callers(pulls, "org/*")
    await callers.named.admit("org/a", "key-1")
    with pytest.raises(Overloaded, match="org/a"):
        await callers.named.admit("org/b", "key-1")
    await callers.named.admit("org/b", "key-2")
    with refused("insufficient_disk"):  # what is on its way will take what is free
        await callers.named.admit("org/c", "key-3")
    # Half of each is here now: the disk has less room, and they need less.
    store.fetched_bytes += GB // 2
    await callers.named.admit("org/c", "key-3")
    store.may_end.set()
    for pull in pulls.under_way:
        await pull.wait()
    await callers.named.admit("org/d", "key-1")


async def test_what_was_refused_or_failed_is_forgotten_and_asked_anew(
    pulls: Pulls, store: ScriptedStore
) -> None:
    callers = Callers(pulls, "org/*")
    callers.refusal = ModelUnavailable("org/a", "gone.")
    with refused("model_unavailable"):
        await callers.named.admit("org/a", "key-1")
    callers.refusal = None
    store.failing["org/b"] = ModelUnavailable("org/b", "its disk is full.")
    await callers.named.admit("org/b", "key-1")
    store.may_end.set()
    with refused("model_unavailable"):
        await pulls.under_way[0].wait()
    assert not callers.served.named
    assert callers.models.seen == {"org/own"}
    store.failing.clear()
    await callers.named.admit("org/b", "key-1")
    assert callers.offered == ["org/a", "org/b", "org/b"]


@pytest.mark.parametrize(
    "refusal",
    [ModelNotFound("o/a"), ModelUnavailable("o/a", "gone."), ModelRefused("o/a", "it is gated.")],
)
async def test_what_the_hub_has_refused_is_not_asked_of_it_again_for_a_while(
    pulls: Pulls, refusal: GatewayError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Admins may ask at once; of how many names it is known has a bound."""
    assert refusal.code is not None
    callers = Callers(pulls, "org/*")
    callers.refusal = refusal
    for name in ("org/a", "hub:org/a", "org/a"):
        with refused(refusal.code):
            await callers.named.admit(name, "key-1")
    assert callers.offered == ["org/a"]
    with refused(refusal.code):
        await callers.named.pull("org/a")
    assert callers.offered == ["org/a", "org/a"]
    now = clock.now
    monkeypatch.setattr(clock, "now", lambda: now() + UNAVAILABLE_S)
    callers.refusal = None
    await callers.named.admit("org/a", "key-1")
    assert callers.offered == ["org/a"] * 3


async def test_the_number_of_remembered_refusals_is_bounded(pulls: Pulls) -> None:
    callers = Callers(pulls, "org/*")
    callers.refusal = ModelNotFound("o/a")
    for number in range(3 * MOST_REFUSED):
        with refused("model_not_found"):
            await callers.named.admit(f"org/{number}", "key-1")
    assert len(callers.named._refusals.models()) <= MOST_REFUSED


async def test_an_idle_model_goes_for_the_next(pulls: Pulls, store: ScriptedStore) -> None:
    callers = Callers(pulls, "org/*")
    store.may_end.set()
    names = [f"org/{number}" for number in range(MOST_NAMED)]
    for name in names:
        await callers.named.admit(name, "key-1")
        await pulls.begin(callers.served.named[name]).wait()
    callers.models.told = dict.fromkeys(names, "loaded")
    with pytest.raises(Overloaded, match="all are in use"):
        await callers.named.admit("org/next", "key-1")
    callers.models.told = {name: "loaded" for name in names if name != "org/3"}
    await callers.named.admit("org/next", "key-1")
    assert callers.served.named.keys() == {*names, "org/next"} - {"org/3"}
    assert callers.models.seen == {"org/own", *names, "org/next"} - {"org/3"}
