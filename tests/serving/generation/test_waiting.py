"""Who joins next, with numbers: requests take turns, and none is walked whole."""

import asyncio
from collections import Counter

from gateway.jobs import Sampling, SequenceParams
from gateway.serving.generation.policy import Decision, WaitingQueue
from gateway.serving.generation.sequence import Sequence


def sequence(request: str, rank: float, index: int = 0) -> Sequence:
    row = SequenceParams(prompt=[1], max_tokens=9, sampling=Sampling())
    return Sequence(row, index, asyncio.Queue(), rank, request=request)


def filled(**rows: tuple[float, int]) -> WaitingQueue:
    """Let each request wait, of a rank, with so many rows."""
    waiting = WaitingQueue()
    for request, (rank, count) in rows.items():
        for index in range(count):
            waiting.add(sequence(request, rank, index))
    return waiting


class Places:
    """Lets so many join, counting how often it is asked."""

    def __init__(self, places: int) -> None:
        self._places = places
        self.calls = 0

    def __call__(self, _: Sequence) -> Decision:
        self.calls += 1
        self._places -= 1
        return Decision.JOIN if self._places >= 0 else Decision.STOP


def names(sequences: list[Sequence]) -> str:
    return "".join(each.request for each in sequences)


def test_requests_give_one_row_in_turn() -> None:
    """The first first; one with many rows takes what the others leave."""
    waiting = filled(a=(1.0, 9), b=(2.0, 2), c=(3.0, 1))
    assert names(waiting.choose({}, Places(7))) == "abcabaa"
    assert len(waiting) == 12, "they were only asked"


def test_one_with_few_rows_inside_goes_before_one_with_many() -> None:
    """Whoever came first: so places that become free one by one are shared too."""
    waiting = filled(a=(1.0, 9), b=(2.0, 9))
    assert names(waiting.choose({"a": 3}, Places(5))) == "bbbab"
    inside = Counter({"a": 8})
    for _ in range(8):
        (one,) = waiting.choose(inside, Places(1))
        waiting.take([one])
        inside[one.request] += 1
    assert inside == {"a": 8, "b": 8}


def test_the_preempted_go_first_by_rank() -> None:
    """They have begun, and their callers read."""
    waiting = filled(a=(1.0, 2))
    for request, rank in (("y", 9.0), ("x", 5.0)):
        late = sequence(request, rank)
        late.row = int(rank)
        waiting.add_preempted(late)
    joining = waiting.choose({}, Places(3))
    assert names(joining) == "xya"
    waiting.take(joining)
    assert (len(waiting), names(list(waiting))) == (1, "a")


def test_a_request_that_is_passed_is_not_asked_again() -> None:
    """Nor does it keep the others."""
    waiting = filled(a=(1.0, 5), b=(2.0, 2))
    asked: list[str] = []

    def decide(each: Sequence) -> Decision:
        asked.append(each.request)
        return Decision.SKIP if each.request == "a" else Decision.JOIN

    assert names(waiting.choose({}, decide)) == "bb"
    assert asked == ["a", "b", "b"]


def test_who_is_given_up_is_met_no_more() -> None:
    """Wherever it stood in its line."""
    waiting = filled(a=(1.0, 5), b=(2.0, 1))
    gone = [each for each in waiting if each.request == "b" or each.index in (0, 1, 3)]
    for each in gone:
        each.is_over = True
        waiting.discard(each)
    assert len(waiting) == 2
    joining = waiting.choose({}, Places(9))
    assert [each.index for each in joining] == [2, 4]
    waiting.take(joining)
    assert len(waiting) == 0
    assert waiting.choose({}, Places(9)) == []


def test_nobody_walks_all_that_wait() -> None:
    """A hundred thousand rows of a few requests are asked about for two places."""
    waiting = filled(a=(1.0, 50_000), b=(2.0, 50_000))
    places = Places(2)
    assert names(waiting.choose({}, places)) == "ab"
    assert places.calls == 3
