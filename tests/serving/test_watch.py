"""The watch: a call that takes too long is a stall, whatever the loop does."""

import asyncio
import threading
import time
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import structlog

from gateway import clock
from gateway.serving import watch as watch_module
from gateway.serving.lane import Beat, Lane
from gateway.serving.watch import STATUS_OF_A_STALL, BeatAge, StallLimits, Status, Watch
from tests.fakes import Gate

pytestmark = pytest.mark.anyio

SHORT = StallLimits(call_s=0.1, load_s=60)


def test_a_beat_is_counted_from_when_it_was_first_seen() -> None:
    one, other = Beat("decode"), Beat("decode")
    still = BeatAge()
    seen = [(1, one), (1, one), (2, one), (1, other), (1, other), (1, None), (1, other)]
    assert [still.update(*each) for each in seen] == [0, 1, 3, 0, 1, 0, 0]
    still.update(2, other)
    assert [still.of(each) for each in (other, Beat("decode"), None)] == [2, 0, 0]


@pytest.mark.parametrize(
    ("beat", "seconds", "is_over"),
    [
        (None, 1e9, False),
        (Beat("decode"), 60, False),
        (Beat("decode"), 61, True),
        (Beat("load", usual_s=None), 599, False),
        (Beat("load", usual_s=None), 601, True),
        (Beat("embedding", usual_s=2), 61, True),
        (Beat("embedding", usual_s=100), 399, False),
        (Beat("embedding", usual_s=100), 401, True),
        (Beat("embedding", usual_s=200), 601, True),
    ],
)
def test_a_call_may_take_its_limit_or_a_multiple_of_calls_like_it(
    beat: Beat | None, seconds: float, is_over: bool
) -> None:
    """One that nobody knows has a limit of its own; a lane without work is never stalled."""
    assert StallLimits(call_s=60, load_s=600).is_over(beat, seconds) is is_over


class Hands:
    """A clock that tests move, each time until the watch has looked: a busy machine moves it not.

    With `tick_s` each look of the watch moves it.
    """

    def __init__(self) -> None:
        self.seconds = self.tick_s = 0.0
        self._looks = threading.Semaphore(0)

    def now(self) -> float:
        if threading.current_thread().name == "watch":
            self.seconds += self.tick_s
            self._looks.release()
        return self.seconds

    def move(self, seconds: float) -> None:
        """Let time pass; the watch looks twice at each hundredth and has then acted."""
        for _ in range(round(100 * seconds)):
            self.seconds += 0.01
            while self._looks.acquire(blocking=False):
                pass
            assert self._looks.acquire(timeout=60)
            assert self._looks.acquire(timeout=60)


@pytest.fixture
def hands() -> Iterator[Hands]:
    """Give the clock by which lane and watch go."""
    hands = Hands()
    with patch.object(clock, "now", hands.now):
        yield hands


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """No error is sent here that the end of the process would have to wait for."""
    monkeypatch.setattr(watch_module, "GRACE_S", 0.01)


async def until(watch: Watch, status: Status) -> None:
    async with asyncio.timeout(60):
        while watch.status != status:
            await asyncio.sleep(0.01)


async def held(lane: Lane, gate: Gate, kind: str = "test") -> "asyncio.Task[None]":
    """Begin a call that lasts until the gate is opened."""

    async def hold() -> None:
        async with lane.turn(kind) as run:
            await run(gate.pass_through)

    gate.close()
    holding = asyncio.create_task(hold())
    await asyncio.to_thread(gate.reached.wait, 60)
    return holding


async def test_a_stuck_call_is_a_stall_until_it_moves(
    hands: Hands, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nobody wants the process to end here; every thread's stack is logged once."""
    gate = Gate()
    lane = Lane()
    with structlog.testing.capture_logs() as lines:
        with Watch(lane, SHORT, on_stall=lambda: None, exit_process=None) as watch:
            async with lane:
                assert watch.status == "ok"
                holding = await held(lane, gate)
                seen: list[Status] = []
                for seconds in (0.08, 0.04):
                    await asyncio.to_thread(hands.move, seconds)
                    seen.append(watch.status)
                assert seen == ["ok", "stalled"]
                gate.open()
                await until(watch, "ok")
                await holding
    assert [line["event"] for line in lines] == ["lane_stalled", "lane_moves_again"]
    assert lines[0]["kind"] == "test"
    told = capfd.readouterr().err
    assert told.count("pass_through") == 1  # the stack names the place where it hung
    assert "Current thread" in told


async def test_steps_of_one_call_are_signs_of_life(hands: Hands) -> None:
    lane = Lane()
    with Watch(lane, SHORT, on_stall=lambda: None, exit_process=None) as watch:
        async with lane, lane.turn("decode") as turn:

            def steps() -> list[Status]:
                seen: list[Status] = []
                for _ in range(4):
                    hands.move(0.05)
                    turn.beat()
                    seen.append(watch.status)
                return seen

            assert set(await turn(steps)) == {"ok"}


async def test_a_busy_loop_is_no_stall_of_the_lane(hands: Hands) -> None:
    """The call was over long ago, but nobody had time to hear of it: the loop is reported."""
    lane, hands.tick_s = Lane(), 0.02
    with (
        structlog.testing.capture_logs() as lines,
        Watch(lane, SHORT, on_stall=lambda: None, exit_process=None) as watch,
    ):
        async with lane, lane.turn("test") as turn:
            asyncio.get_running_loop().call_soon(_keep_the_loop, watch)
            await turn(int)
        await until(watch, "ok")
    assert [line["event"] for line in lines] == ["loop_stalled", "loop_moves_again"]


def _keep_the_loop(watch: Watch) -> None:
    """Keep the event loop until the watch says that it is kept."""
    for _ in range(2000):
        if watch.status != "ok":
            break
        time.sleep(0.01)


async def test_what_was_never_measured_may_take_longer() -> None:
    """Loading, and the first call of a shape, not the second; after a load every shape is new."""
    lane = Lane()

    async def usual_s(kind: str, shape: str | None = None) -> float | None:
        def look() -> float | None:
            assert lane.beat is not None
            return lane.beat.usual_s

        async with lane.turn(kind) as turn:
            if shape is not None:
                turn.set_shape(shape)
            return await turn(look)

    async with lane:
        assert await usual_s("load") is None
        assert await usual_s("test") == 0
        assert [await usual_s("decode", shape) for shape in "ab"] == [None, None]
        again = [await usual_s("decode", shape) for shape in "ab"]
        assert all(seconds is not None and seconds > 0 for seconds in again)
        assert await usual_s("load") is None
        assert await usual_s("decode", "a") is None


async def test_a_dead_lane_is_known_of_at_once() -> None:
    left: list[int] = []
    lane = Lane()
    with Watch(lane, SHORT, on_stall=lambda: None, exit_process=left.append) as watch:
        async with lane:
            with pytest.raises(Exception, match="stopped"):
                async with lane.turn("test") as run:
                    await run(_leave_the_thread)
            assert watch.status == "dead"
            async with asyncio.timeout(60):
                while not left:
                    await asyncio.sleep(0.01)
    assert left == [STATUS_OF_A_STALL]


def _leave_the_thread() -> None:
    raise SystemExit


async def test_a_loop_that_does_not_turn_ends_the_process(
    hands: Hands, capfd: pytest.CaptureFixture[str]
) -> None:
    """It waits for a thread that found no memory to begin; /health does not answer either."""
    hands.tick_s = 0.02
    ended = threading.Event()
    statuses: list[int] = []

    def exit_process(status: int) -> None:
        statuses.append(status)
        ended.set()

    async with Lane() as lane:
        with Watch(lane, SHORT, on_stall=lambda: None, exit_process=exit_process):
            assert ended.wait(30)  # this wait keeps the loop
    assert statuses == [STATUS_OF_A_STALL]
    assert "test_watch.py" in capfd.readouterr().err
