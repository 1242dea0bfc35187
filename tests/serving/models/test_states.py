"""The states of a cached model: each legal move as callers provoke it, every other one refused."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest

from gateway.errors import GatewayError, ModelLoadFailed
from gateway.registry import Catalog
from gateway.serving.models.cache import ModelCache
from gateway.serving.models.entry import MOVES, Entry, State
from tests.serving.models.harness import Shelf, cache, settle, spec

pytestmark = pytest.mark.anyio
LEGAL = [(before, after) for before in State for after in State if after in MOVES[before]]
ILLEGAL = [(before, after) for before in State for after in State if after not in MOVES[before]]
PATHS = {
    State.LOADING: (),
    State.READY: (State.READY,),
    State.RETIRING: (State.RETIRING,),
    State.LEAVING: (State.LEAVING,),
    State.GONE: (State.GONE,),
}


class Scene:
    """A cache with one place, and what callers and operators do to its model `a`."""

    def __init__(self, models: ModelCache[str], shelf: Shelf) -> None:
        self.models = models
        self.shelf = shelf
        self.release_all = asyncio.Event()
        self.tasks: list[asyncio.Task[None]] = []
        self.entry: Entry[str]

    def start(self, action: Awaitable[object]) -> None:
        async def run() -> None:
            with contextlib.suppress(GatewayError):
                await action

        self.tasks.append(asyncio.create_task(run()))

    async def use(self, name: str) -> None:
        """Lease a model until `release`."""
        async with self.models.lease(spec(name)):
            await self.release_all.wait()

    def ask(self) -> None:
        self.shelf.may_load.clear()
        self.start(self.use("a"))

    def finish(self) -> None:
        self.shelf.may_load.set()

    def fail(self) -> None:
        self.shelf.failures["a"] = ModelLoadFailed("a", "corrupt")
        self.shelf.may_load.set()

    def unload(self) -> None:
        self.start(self.models.unload(spec("a")))

    def release(self) -> None:
        self.release_all.set()

    def ask_for_another(self) -> None:
        self.start(self.use("b"))

    def hang_up(self) -> None:
        """Cancel the caller that came last."""
        self.tasks[-1].cancel()

    def remove(self) -> None:
        """Reload a catalog that lacks the model."""
        self.shelf.catalog = Catalog([spec("b")])
        self.models.reconsider()

    def cancel(self) -> None:
        """Cancel the model's task, as the end of its event loop does."""
        assert self.entry.task is not None
        self.entry.task.cancel()
        self.shelf.may_free.set()

    def free(self) -> None:
        self.shelf.may_free.set()


Act = Callable[[Scene], None]
LOAD: tuple[Act, ...] = (Scene.ask, Scene.finish)
PROVOKED: dict[tuple[State, State], tuple[Act, ...]] = {
    (State.LOADING, State.READY): (Scene.ask, Scene.finish),
    (State.LOADING, State.RETIRING): (Scene.ask, Scene.unload),
    (State.LOADING, State.LEAVING): (Scene.ask, Scene.remove, Scene.hang_up),
    (State.LOADING, State.GONE): (Scene.ask, Scene.fail),
    (State.READY, State.RETIRING): (*LOAD, Scene.unload),
    (State.READY, State.LEAVING): (*LOAD, Scene.release, Scene.ask_for_another),
    (State.READY, State.GONE): (*LOAD, Scene.cancel),
    (State.RETIRING, State.LEAVING): (*LOAD, Scene.unload, Scene.release),
    (State.RETIRING, State.GONE): (Scene.ask, Scene.unload, Scene.fail),
    (State.LEAVING, State.GONE): (*LOAD, Scene.unload, Scene.release, Scene.free),
}


@pytest.mark.parametrize(("before", "after"), LEGAL, ids=lambda state: state.name)
async def test_each_legal_move_is_one_that_callers_provoke(before: State, after: State) -> None:
    """With one place: loads, leases, unloads, reloads, failures and other models' needs."""
    *acts, last = PROVOKED[before, after]
    shelf = Shelf()
    shelf.may_free.clear()
    async with cache(shelf, max_models=1) as models, asyncio.timeout(10):
        scene = Scene(models, shelf)
        for act in acts:
            act(scene)
            await settle()
            scene.entry = getattr(scene, "entry", models.entries[0])
        assert scene.entry.state is before
        last(scene)
        await settle()
        assert scene.entry.state is after
        shelf.may_free.set()
        shelf.may_load.set()
        scene.release_all.set()
        await asyncio.gather(*scene.tasks, return_exceptions=True)
    assert shelf.open == []


@pytest.mark.parametrize(("before", "after"), ILLEGAL, ids=lambda state: state.name)
async def test_an_illegal_move_is_an_error(before: State, after: State) -> None:
    """It names the model and both states, and changes nothing."""
    entry = Entry[str](spec("a"))
    for state in PATHS[before]:
        entry.move_to(state)
    with pytest.raises(AssertionError, match=f"a: {before} → {after}"):
        entry.move_to(after)
    assert entry.state is before


def test_every_state_leads_to_the_end() -> None:
    """A load may fail and a task be cancelled at any time."""
    assert all(State.GONE in after for state, after in MOVES.items() if state is not State.GONE)
    assert MOVES[State.GONE] == set()
