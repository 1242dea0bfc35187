"""The lane: one thread, one turn at a time, in fair shares."""

import asyncio
import threading
from unittest.mock import patch

import pytest

from gateway import clock
from gateway.errors import ShuttingDown, Unavailable
from gateway.serving.lane import LEAST_TOKENS, START_TOKENS, Lane, Pace, Turn
from tests.fakes import Gate

pytestmark = pytest.mark.anyio


async def test_all_work_runs_on_one_thread_of_its_own() -> None:
    async with Lane() as lane:
        threads = []
        for _ in range(3):
            async with lane.turn("test") as run:
                threads.append(await run(threading.current_thread))
    assert len(set(threads)) == 1
    assert threads[0] is not threading.current_thread()


async def test_an_exception_is_told_to_whoever_asked() -> None:
    async with Lane() as lane:
        async with lane.turn("test") as run:
            with pytest.raises(ZeroDivisionError):
                await run(lambda: 1 // 0)
            async with asyncio.timeout(60):
                with pytest.raises(RuntimeError, match="StopIteration"):  # no future takes it
                    await run(next, iter(()))
            assert await run(int, "3") == 3


async def test_a_turn_lasts_until_its_work_is_over_however_often_it_is_cancelled() -> None:
    gate = Gate()
    gate.close()

    async def hold() -> None:
        async with lane.turn("test") as run:
            await run(gate.pass_through)

    async with Lane() as lane:
        holding = asyncio.create_task(hold())
        await asyncio.to_thread(gate.reached.wait, 60)
        for _ in range(3):
            holding.cancel()
            await asyncio.sleep(0.01)
            assert not holding.done()
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await holding


async def test_what_a_cancelled_call_made_is_freed_on_the_lanes_thread() -> None:
    gate = Gate()
    gate.close()
    freed: list[threading.Thread] = []

    class Engine:
        def __del__(self) -> None:
            freed.append(threading.current_thread())

    def load() -> Engine:
        gate.pass_through()
        return Engine()

    async def use() -> None:
        async with lane.turn("load") as run:
            await run(load)

    async with Lane() as lane:
        using = asyncio.create_task(use())
        await asyncio.to_thread(gate.reached.wait, 60)
        using.cancel()
        await asyncio.sleep(0)
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await using
        async with lane.turn("test") as run:
            assert freed == [await run(threading.current_thread)]


async def test_a_turn_knows_when_it_is_up() -> None:
    """A long one asks this between steps: not before somebody waits."""
    async with Lane() as lane:
        assert lane.is_idle
        async with lane.turn("test") as turn:
            assert not lane.is_idle
            assert not turn.is_contended
            assert not turn.is_up
            waiting = asyncio.create_task(_one_turn(lane))
            await asyncio.sleep(0)
            assert turn.is_contended
            assert turn.is_up
        await waiting
        assert lane.is_idle


async def test_a_kind_behind_its_share_goes_on_though_another_waits() -> None:
    """Decoding may take several steps between two long embedding passes."""
    now_s = 0.0

    async def embed() -> None:
        nonlocal now_s
        async with lane.turn("embedding"):
            now_s += 0.05

    with patch.object(clock, "now", lambda: now_s):
        async with Lane() as lane:
            async with lane.turn("decode"):
                embedding = asyncio.create_task(embed())
                await asyncio.sleep(0)
            await embedding
            async with lane.turn("decode") as turn:
                waiting = asyncio.create_task(embed())
                await asyncio.sleep(0)
                assert turn.is_contended
                assert not turn.is_up
                now_s += 0.06
                assert turn.is_up
            await waiting


async def test_the_kind_that_had_least_is_next_whoever_asked_first() -> None:
    """Three waiting loads do not come before the first embedding."""
    order: list[str] = []

    async def take(kind: str, hold_s: float = 0) -> None:
        async with lane.turn(kind):
            order.append(kind)
            await asyncio.sleep(hold_s)

    async with Lane() as lane:
        async with lane.turn("decode"):
            waiting = [asyncio.create_task(take("load", 0.01)) for _ in range(3)]
            await asyncio.sleep(0)
            waiting.append(asyncio.create_task(take("embedding")))
            await asyncio.sleep(0)
        await asyncio.gather(*waiting)
    assert order == ["load", "embedding", "load", "load"]


async def test_a_waiter_who_leaves_gives_its_place_up() -> None:
    """The waiter leaves before its turn, or at the very moment it gets it."""
    async with Lane() as lane:
        for moment in ("waiting", "as the holder ends", "given"):
            async with lane.turn("test"):
                leaving = asyncio.create_task(_one_turn(lane))
                staying = asyncio.create_task(_one_turn(lane))
                await asyncio.sleep(0)
                if moment != "given":
                    leaving.cancel()
                if moment == "waiting":
                    await asyncio.sleep(0)
            if moment == "given":
                leaving.cancel()
            async with asyncio.timeout(60):
                await staying
            assert leaving.cancelled()
            assert lane.is_idle


async def test_a_closed_lane_refuses_and_its_farewell_ran_on_its_thread() -> None:
    """MLX aborts the process when a thread that used it just ends."""
    farewells: list[threading.Thread] = []
    async with Lane(on_close=lambda: farewells.append(threading.current_thread())) as lane:
        async with lane.turn("test") as run:
            thread = await run(threading.current_thread)
    assert farewells == [thread]
    assert not lane.is_alive
    with pytest.raises(ShuttingDown):
        await _one_turn(lane)


async def test_what_ends_a_thread_ends_the_lane_and_is_told() -> None:
    """Callers inside, in line and later are told; and the lane closes as ever."""
    farewells: list[threading.Thread] = []
    async with Lane(on_close=lambda: farewells.append(threading.current_thread())) as lane:
        async with lane.turn("test") as run:
            waiting = asyncio.create_task(_one_turn(lane))
            await asyncio.sleep(0)
            with pytest.raises(Unavailable, match="stopped"):
                await run(_exit)
            with pytest.raises(Unavailable, match="stopped"):
                await run(int)
        for late in (waiting, asyncio.create_task(_one_turn(lane))):
            with pytest.raises(Unavailable, match="stopped"):
                await late
        assert lane.has_died
        assert not lane.is_alive
    assert len(farewells) == 1


def _exit() -> None:
    raise SystemExit


async def _one_turn(lane: Lane) -> None:
    async with lane.turn("test"):
        await asyncio.sleep(0)


async def test_what_is_under_way_is_waited_for_before_another_owners_call() -> None:
    """MLX raises its error once, to whoever waits first: it has to be its owner."""
    calls: list[str] = []
    async with Lane() as lane:
        for owner in ("mine", "mine", "other", "mine"):
            async with lane.turn("decode", owner) as turn:

                def work(turn: Turn = turn, owner: str = owner) -> None:
                    calls.append(owner)
                    if owner == "mine":
                        turn.leave_under_way(lambda: calls.append("waited"))

                await turn(work)
    assert calls == ["mine", "mine", "waited", "other", "mine"]


async def test_a_turn_rests_only_for_turns_that_are_due() -> None:
    """Its own seconds are those that it holds the lane."""
    order: list[str] = []

    async def other() -> None:
        async with lane.turn("decode"):
            order.append("other")
            await asyncio.sleep(0.05)

    async with Lane() as lane:
        began = clock.now()
        async with lane.turn("embedding") as turn:
            await turn.rest()
            order.append("alone")
            waiting = asyncio.create_task(other())
            await asyncio.sleep(0)
            await turn.rest()
            order.append("after")
            assert turn.held_s + turn.waited_s <= clock.now() - began
        await waiting
        assert lane.is_idle
    assert order == ["alone", "other", "after"]


async def test_a_turn_cancelled_at_rest_leaves_the_lane_to_its_holder() -> None:
    entered, leaving = asyncio.Event(), asyncio.Event()

    async def holder() -> None:
        async with lane.turn("decode"):
            entered.set()
            await leaving.wait()

    async def rests() -> None:
        async with lane.turn("embedding") as turn:
            holding.append(asyncio.create_task(holder()))
            await asyncio.sleep(0)
            await turn.rest()

    holding: list[asyncio.Task[None]] = []
    async with Lane() as lane:
        resting = asyncio.create_task(rests())
        await entered.wait()
        resting.cancel()
        await asyncio.wait([resting])
        assert resting.cancelled()
        assert not lane.is_idle
        leaving.set()
        await holding[0]
        assert lane.is_idle


@pytest.mark.parametrize(
    ("token_s", "tokens"),
    [(0.0, START_TOKENS), (1e-6, START_TOKENS), (0.001, 250), (1.0, LEAST_TOKENS)],
)
def test_a_first_pass_is_no_larger_than_the_estimate(token_s: float, tokens: int) -> None:
    assert Pace(0.25, token_s).tokens == tokens
