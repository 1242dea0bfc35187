"""Rank 0 and another rank over real sockets, with scripted engines: alike, refused, lost."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import pytest

from gateway.errors import BadRequest, ModelLoadFailed, Unavailable
from gateway.jobs.chat import Sampling
from gateway.jobs.steps import SequenceParams, StepPlan, StepResult
from gateway.serving.ports import GenerationEngine
from gateway.serving.ranks.calls import Setup
from gateway.serving.ranks.following import follow
from gateway.serving.ranks.leading import LeadingEngine, lead_in_steps
from gateway.serving.ranks.links import Follower, Invitation, Leader, Link, accept, inviting
from tests.fakes import ScriptedChat

SETUP = Setup("spec", "files", 0, 0)


def params(text: str, **fields: Any) -> SequenceParams:
    return SequenceParams(
        prompt=[ord(each) for each in text], max_tokens=9, sampling=Sampling(), **fields
    )


def join(engine: GenerationEngine, *rows: SequenceParams) -> StepResult:
    """Let rows join, numbered from 1, and read their prompts."""
    joining = list(enumerate(rows, 1))
    return engine.step(StepPlan(kind="prefill", token_budget=64, joining=joining))


def decode(engine: GenerationEngine) -> list[str]:
    return [delta.text for delta in engine.step(StepPlan(kind="decode")).deltas]


@dataclass
class Ranks:
    """Rank 0's connections, and the events on rank 1."""

    leader: Leader
    follower: Follower
    invitation: Invitation
    engines: list[ScriptedChat] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    thread: threading.Thread | None = None

    def follow(self, make: Callable[[], ScriptedChat] = ScriptedChat) -> None:
        """Follow on a thread of its own, with engines made so."""

        def load(model: str, setup: Setup) -> ScriptedChat:
            assert setup == SETUP, model
            self.engines.append(make())
            return self.engines[-1]

        self.thread = threading.Thread(
            target=follow, args=(self.follower, load, lambda: None), daemon=True
        )
        self.thread.start()

    def lead(self, engine: ScriptedChat) -> LeadingEngine:
        steps = lead_in_steps(self.leader, "m", SETUP, iter_engine(engine))
        found = next(each for each in steps if each is not None)
        assert isinstance(found, LeadingEngine)
        return found


def iter_engine(engine: ScriptedChat) -> Any:
    yield None
    yield engine


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with connected() as ranks:
        yield ranks


@contextmanager
def connected() -> Iterator[Ranks]:
    statuses: list[int] = []
    with inviting("127.0.0.1") as (invitation, listener):
        made: list[Follower] = []
        joining = threading.Thread(
            target=lambda: made.append(Follower.connect(invitation, 1, statuses.append))
        )
        joining.start()
        leader = accept(listener, invitation, [1])
        joining.join()
    ranks = Ranks(leader, made[0], invitation, statuses=statuses)
    yield ranks
    leader.close()
    if ranks.thread is not None:
        ranks.thread.join(60)
        assert not ranks.thread.is_alive()


def test_the_other_rank_makes_every_call(ranks: Ranks) -> None:
    ranks.follow()
    mine = ScriptedChat()
    engine = ranks.lead(mine)
    read = join(engine, params("ab"), params("xyz"))
    assert (read.deltas, read.decoding) == ([], 2)
    assert decode(engine) == ["a", "x"]
    assert engine.step(StepPlan(parking=[1], preempting=[2])).decoding == 0
    plan = StepPlan(kind="decode", resuming=[1], capped=[(1, 2)])
    assert [delta.text for delta in engine.step(plan).deltas] == ["b"]
    assert [verdict.is_whole for verdict in engine.self_test()] == [True]
    engine.step(StepPlan(leaving=[1, 2]))
    [other] = ranks.engines
    assert (other.joined, other.left, other.steps) == (mine.joined, mine.left, mine.steps)
    seeds = {engine.params[row].sampling.seed for engine in (mine, other) for row in (1, 2)}
    assert len(seeds) == 2
    assert None not in seeds
    engine.close()
    ranks.leader.close()
    assert ranks.thread
    ranks.thread.join(60)
    assert other.is_closed
    assert ranks.statuses == []


def test_a_call_that_fails_everywhere_fails_for_its_caller_alone(ranks: Ranks) -> None:
    class Refusing(ScriptedChat):
        def join(self, number: int, params: SequenceParams) -> None:
            if params.prompt[0] == ord("!"):
                raise BadRequest("no")
            super().join(number, params)

        def probe(self) -> None:
            raise RuntimeError("no")

    ranks.follow(Refusing)
    engine = ranks.lead(Refusing())
    [refused] = join(engine, params("!"), params("a")).deltas
    assert (refused.id, refused.error) == (1, "no")
    with pytest.raises(RuntimeError):
        engine.probe()
    assert decode(engine) == ["a"]
    assert ranks.leader.lost is None


def test_a_model_answers_while_others_load(ranks: Ranks) -> None:
    """Rank 1's reports on the loads must not be lost: otherwise the loads wait for ever."""
    ranks.follow()
    engine = ranks.lead(ScriptedChat())
    loads = [
        lead_in_steps(ranks.leader, model, SETUP, iter_engine(ScriptedChat()))
        for model in ("n", "o")
    ]
    assert [next(each) for each in loads] == [None, None]
    join(engine, params("ab"))
    assert decode(engine) == ["a"]
    for load in loads:
        loaded = next(each for each in islice(load, 500) if each is not None)
        assert join(loaded, params("xyz")).decoding == 1


def test_another_outcome_ends_the_group_before_anything_is_answered(ranks: Ranks) -> None:
    """A rank that wrote another token may have another shape in its next pass."""
    ranks.follow(lambda: ScriptedChat(script=[{"text": "other", "tokens": 1}]))
    engine = ranks.lead(ScriptedChat())
    join(engine, params("ab"))
    with pytest.raises(Unavailable, match="rank 1 got a different result"):
        decode(engine)
    assert ranks.leader.lost == "rank 1 got a different result"
    with pytest.raises(Unavailable):
        decode(engine)


def test_a_load_that_fails_on_one_rank_is_undone_and_names_it(ranks: Ranks) -> None:
    """The next load is not confused by leftovers of the failed one."""
    failing = iter([True, False, False])

    def make() -> ScriptedChat:
        if next(failing):
            raise ModelLoadFailed("m", "the disk is full")
        return ScriptedChat()

    ranks.follow(make)
    mine = ScriptedChat()
    with pytest.raises(ModelLoadFailed, match=r"rank 1: .*the disk is full"):
        ranks.lead(mine)
    assert mine.is_closed

    def broken() -> Any:
        yield None
        raise ModelLoadFailed("m", "here")

    with pytest.raises(ModelLoadFailed, match="here"):
        list(lead_in_steps(ranks.leader, "m", SETUP, broken()))
    assert join(ranks.lead(ScriptedChat()), params("a")).decoding == 1


def cut(link: Link) -> None:
    """End a connection as the kernel does whose process is gone."""
    with socket.socket(fileno=os.dup(link.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


def test_a_rank_that_goes_while_rank_0_waits_is_noticed(ranks: Ranks) -> None:
    """Rank 0 waits for its word on a load, and would wait for ever."""
    steps = lead_in_steps(ranks.leader, "m", SETUP, iter_engine(ScriptedChat()))
    assert next(steps) is None
    cut(ranks.follower._link)
    with pytest.raises(Unavailable, match="rank 1 is gone"):
        list(steps)
    assert ranks.leader.lost == "rank 1 is gone"


def test_a_rank_whose_rank_0_goes_ends_its_process(ranks: Ranks) -> None:
    for link in ranks.leader._links.values():
        cut(link)
    for _ in range(1000):
        if ranks.statuses:
            break
        time.sleep(0.01)
    assert ranks.statuses == [70]


def test_a_rank_that_is_told_to_stop_asks_rank_0(ranks: Ranks) -> None:
    asked = threading.Event()
    ranks.leader.on_stop = asked.set
    ranks.follower.ask_to_stop()
    assert asked.wait(60)
    assert ranks.leader.lost is None


@contextmanager
def waited_for(strangers: int) -> Iterator[list[socket.socket]]:
    """Give connections of strangers while rank 1 is waited for; it has to be let in after them."""
    with contextlib.ExitStack() as stack:
        invitation, listener = stack.enter_context(inviting("127.0.0.1"))
        address = (invitation.host, invitation.port)
        joined: list[Leader] = []
        thread = threading.Thread(
            target=lambda: joined.append(accept(listener, invitation, [1])), daemon=True
        )
        thread.start()
        yield [stack.enter_context(socket.create_connection(address)) for _ in range(strangers)]
        follower = Follower.connect(invitation, 1, lambda _: None)
        thread.join(60)
        [leader] = joined
        leader.close()
        assert follower.next_frame(10) == b""


@pytest.mark.parametrize(
    "hello",
    [b"", b"\0\0\0\2{}", b"\xff\xff\xff\xff", b'\0\0\0\x09["no", 1]', b"GET / HTTP/1.1\r\n\r\n"],
)
def test_a_stranger_is_turned_away(hello: bytes) -> None:
    """One without the word that went over the ranks' own connections."""
    with waited_for(1) as [link]:
        with contextlib.suppress(OSError):  # it may be turned away in the middle of that
            link.sendall(hello)
            link.shutdown(socket.SHUT_WR)
            assert link.recv(1) == b""


def test_strangers_that_never_end_what_they_say_hold_up_no_rank() -> None:
    """One says a byte now and then, others nothing at all."""
    is_over = threading.Event()

    def dribble(link: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it is turned away
            while not is_over.wait(0.05):
                link.sendall(b" ")

    with waited_for(3) as links:
        links[0].sendall((60_000).to_bytes(4, "big"))
        dribbling = threading.Thread(target=dribble, args=(links[0],), daemon=True)
        dribbling.start()
    is_over.set()
    dribbling.join(60)


def test_ranks_that_do_not_connect_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.serving.ranks.links.JOIN_S", 0.1)
    with (
        inviting("127.0.0.1") as (invitation, listener),
        socket.create_connection((invitation.host, invitation.port)) as stranger,
    ):
        with pytest.raises(TimeoutError, match=r"ranks \[1, 2\] did not connect in 0.1 s"):
            accept(listener, invitation, [1, 2])
        assert stranger.recv(1) == b""


def test_the_oldest_of_many_strangers_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.serving.ranks.links.MOST_UNKNOWN", 2)
    with waited_for(3) as links:
        assert links[0].recv(1) == b""
