"""Who is let in, who leaves, who yields: the plan, with numbers."""

from typing import Any

import pytest

from gateway.serving.models.eviction import (
    FORGET_S,
    Phase,
    Plan,
    Resident,
    make_plan,
    patience_s,
    pick,
)

WAITING, LOADING, IDLE, BUSY, RETIRING, LEAVING = Phase


def plan(
    free: int, rows: int = 0, *, places: int = 9, may_hold_rows: bool = True, **residents: Any
) -> Plan[str]:
    """Plan for residents, given as they are or as (phase, bytes, last used)."""
    given = {
        name: each if isinstance(each, Resident) else Resident(*each)
        for name, each in residents.items()
    }
    return make_plan(
        given, max_models=places, free_bytes=free, rows_bytes=rows, may_hold_rows=may_hold_rows
    )


def test_a_model_that_fits_is_let_in() -> None:
    """And so is the next, beside it."""
    assert plan(20, a=(WAITING, 10), b=(WAITING, 10)) == Plan(admitted=("a", "b"))


def test_nobody_overtakes_a_model_that_waits() -> None:
    """A smaller one that came later is not let into what the first waits for."""
    assert plan(10, a=(LEAVING, 10), b=(WAITING, 20), c=(WAITING, 5)).admitted == ()
    assert plan(10, a=(LEAVING, 30), b=(WAITING, 20), c=(WAITING, 5)).admitted == ()
    assert plan(25, places=1, a=(LOADING, 0), b=(WAITING, 20)).admitted == ()


def test_a_model_that_nobody_asks_for_any_more_is_overtaken() -> None:
    """Its caller hung up, or gave up: it comes when nobody else wants the room."""
    gone = Resident(WAITING, 10, is_requested=False)
    assert plan(10, a=gone, b=(WAITING, 10)).admitted == ("b",)


def test_the_idle_model_used_longest_ago_leaves_and_no_more_than_need_be() -> None:
    """By bytes and by places."""
    idle: dict[str, Any] = {"a": (IDLE, 10, 3.0), "b": (IDLE, 30, 1.0), "c": (IDLE, 50, 2.0)}
    assert plan(0, **idle, d=(WAITING, 5)).leaving == ("b",)
    assert plan(0, **idle, d=(WAITING, 31)).leaving == ("b", "c")
    assert plan(5, places=3, **idle, d=(WAITING, 5)).leaving == ("b",)
    assert plan(0, **idle, d=(WAITING, 5)).yielding == frozenset()


def test_nobody_leaves_where_all_that_could_would_not_suffice() -> None:
    """It would be for nothing: what is lacking is held by who is loading, pinned or in peace."""
    idle: dict[str, Any] = {"a": (IDLE, 10, 1.0)}
    for other in (
        Resident(LOADING, 90),
        Resident(BUSY, 90, is_pinned=True),
        Resident(IDLE, 90, is_pinned=True),
        Resident(BUSY, 90, may_yield=False),
    ):
        given = plan(0, **idle, b=other, c=(WAITING, 20))
        assert (given.leaving, given.yielding, given.claimed_bytes) == ((), frozenset(), 0)


def test_nobody_leaves_before_all_can_who_have_to() -> None:
    """The idle one serves its callers while the busy one's answers end."""
    given = plan(0, a=(IDLE, 10), b=(BUSY, 10), c=(WAITING, 20))
    assert (given.leaving, given.yielding) == ((), frozenset({"b"}))
    emptied = plan(0, a=(IDLE, 10), b=Resident(IDLE, 10, is_yielding=True), c=(WAITING, 20))
    assert set(emptied.leaving) == {"a", "b"}


def test_a_model_that_is_leaving_is_waited_for() -> None:
    """Nobody else leaves, and no row takes its bytes."""
    given = plan(5, a=(LEAVING, 10), b=(IDLE, 10), c=(WAITING, 12))
    assert given == Plan(claimed_bytes=2)


def test_bytes_that_rows_give_back_are_waited_for() -> None:
    """No model yields for them; new rows wait, so that they come back."""
    given = plan(5, rows=30, a=(BUSY, 60), b=(WAITING, 20))
    assert given == Plan(claimed_bytes=20, recalls=True)


def test_rows_are_held_back_for_a_while_only() -> None:
    """Then the model whose rows they are yields, if it may."""
    given = plan(5, rows=30, may_hold_rows=False, a=(BUSY, 60), b=(WAITING, 20))
    assert (given.claimed_bytes, given.yielding) == (0, frozenset({"a"}))


def test_rows_do_not_help_where_a_place_is_lacking() -> None:
    """Nor are they held back then: those that a yielding model has still to write would be too."""
    given = plan(5, rows=30, places=1, a=(BUSY, 60), b=(WAITING, 20))
    assert (given.claimed_bytes, given.yielding) == (0, frozenset({"a"}))


def test_a_model_that_retires_is_waited_for() -> None:
    """It was unloaded by hand, or the catalog changed: nobody else has to yield."""
    given = plan(0, places=2, a=(BUSY, 10), b=(RETIRING, 10), c=(WAITING, 10))
    assert (given.yielding, given.leaving) == (frozenset(), ())


def test_who_yields_goes_on_yielding() -> None:
    """Two in use are not both kept from their callers, where one is enough."""
    given = plan(0, a=(BUSY, 10, 1.0), b=Resident(BUSY, 10, 2.0, is_yielding=True), c=(WAITING, 10))
    assert given.yielding == {"b"}


@pytest.mark.parametrize(
    "waiting", [{}, {"b": Resident(WAITING, 10, is_requested=False)}], ids=["gone", "not asked for"]
)
def test_nobody_yields_unless_a_caller_waits(waiting: dict[str, Any]) -> None:
    """The asker hung up: the busy model's callers are let in again; nor is a row held back."""
    given = plan(0, rows=50, a=Resident(BUSY, 10, is_yielding=True), **waiting)
    assert given == Plan()


def test_a_model_that_nobody_asks_for_takes_the_place_of_idle_ones_alone() -> None:
    """Its caller was told to come back."""
    given = plan(0, a=(IDLE, 10), b=Resident(WAITING, 10, is_requested=False))
    assert given.leaving == ("a",)


def test_two_that_wait_are_counted_together() -> None:
    """One idle model is room for one of them; for the second another yields."""
    given = plan(0, a=(IDLE, 10), b=(BUSY, 10), c=(WAITING, 10), d=(WAITING, 10))
    assert (given.leaving, given.yielding) == (("a",), frozenset({"b"}))


def adapter(phase: Phase, nbytes: int, **given: Any) -> Resident:
    return Resident(phase, nbytes, base="a", may_yield=False, **given)


@pytest.mark.parametrize("is_requested", [True, False])
def test_an_adapter_is_let_in_before_a_model_that_waits_for_its_base(is_requested: bool) -> None:
    """It holds the base, whatever came first: neither could go on. The base yields all the same."""
    one = adapter(WAITING, 10, is_requested=is_requested)
    for free, places in ((50, 1), (10, 9)):
        given = plan(free, places=places, a=(BUSY, 90), b=(WAITING, 90), one=one)
        assert (given.admitted, given.yielding) == (("one",), frozenset({"a"}))


@pytest.mark.parametrize("phase", [WAITING, LOADING, BUSY])
def test_a_model_that_yields_gives_back_what_its_adapters_hold(phase: Phase) -> None:
    """They are idle when it is, so that no adapter in use keeps a newcomer out."""
    free = 10 if phase is WAITING else 0
    given = plan(free, a=(BUSY, 90), one=adapter(phase, 10), b=(WAITING, 100))
    assert given.yielding == {"a"}
    assert not plan(free, a=(BUSY, 90), one=adapter(phase, 10), b=(WAITING, 101)).yielding


def test_no_model_yields_to_an_adapter_of_its_own() -> None:
    """Which holds it: it would yield in vain. Another does."""
    given = plan(0, a=(BUSY, 90, 1.0), b=(BUSY, 90, 2.0), one=adapter(WAITING, 10))
    assert given.yielding == {"b"}
    assert plan(0, a=(BUSY, 90), one=adapter(WAITING, 10)) == Plan(recalls=True)


def test_of_two_adapters_that_wait_for_each_other_s_base_the_later_gives_its_own_back() -> None:
    """And the first keeps its own, which the later one would wait for."""
    two = Resident(WAITING, 10, base="b", may_yield=False)
    given = plan(5, a=(BUSY, 90, 1.0), b=(BUSY, 90, 2.0), one=adapter(WAITING, 10), two=two)
    assert (given.yielding, given.withdrawn) == (frozenset({"b"}), ("two",))
    given = plan(5, a=(BUSY, 90, 1.0), b=(BUSY, 90, 2.0), two=two, one=adapter(WAITING, 10))
    assert (given.yielding, given.withdrawn) == (frozenset({"a"}), ("one",))


def test_an_adapter_for_which_nothing_can_be_done_gives_its_base_back_to_others() -> None:
    """To a later adapter, and to a model, as it keeps both waiting and is not served itself."""
    for other in (Resident(WAITING, 10, base="b"), Resident(WAITING, 80)):
        in_peace = Resident(BUSY, 90, may_yield=False)
        given = plan(5, a=(BUSY, 90), b=in_peace, one=adapter(WAITING, 10), other=other)
        assert (given.yielding, given.withdrawn) == (frozenset({"a"}), ("one",))


def test_an_adapter_that_lacks_room_does_not_wait_for_its_own_base() -> None:
    """Which leaves after it: another yields, or it goes to the base's next copy."""
    given = plan(0, a=(RETIRING, 90), b=(BUSY, 90), one=adapter(WAITING, 10))
    assert (given.yielding, given.withdrawn) == (frozenset({"b"}), ())
    unloaded = adapter(WAITING, 10, is_base_open=False)
    assert plan(0, a=(RETIRING, 90), b=(BUSY, 90), one=unloaded) == Plan(withdrawn=("one",))


def test_an_adapter_without_callers_holds_no_base_that_others_wait_for() -> None:
    """It takes idle models' room, or gives its base back."""
    one = adapter(WAITING, 10, is_requested=False)
    assert plan(0, a=(BUSY, 90), b=(IDLE, 90), one=one).leaving == ("b",)
    assert plan(0, a=(BUSY, 90), b=(BUSY, 90), one=one) == Plan(withdrawn=("one",))


def test_an_adapter_that_nobody_asks_for_keeps_no_room_that_it_lacks() -> None:
    """Others have it, though adapters come first."""
    one = adapter(WAITING, 30, is_requested=False)
    assert plan(20, a=(BUSY, 90), b=(WAITING, 20), one=one).admitted == ("b",)


def test_pick_takes_as_many_as_bytes_are_needed() -> None:
    """And none when nothing is lacking."""
    held = {
        "a": Resident(IDLE, 10, 1.0),
        "b": Resident(IDLE, 30, 2.0),
        "c": Resident(IDLE, 50, 3.0),
    }
    assert pick(held, places=0, nbytes=0) == []
    assert pick(held, places=-1, nbytes=5) == ["a"]
    assert pick(held, places=-1, nbytes=11) == ["a", "b"]
    assert pick(held, places=2, nbytes=1) == ["a", "b"]
    assert pick(held, places=0, nbytes=1000) == ["a", "b", "c"]


def test_patience_grows_with_each_refusal_and_is_forgotten() -> None:
    """So one whose neighbours' answers are long has its turn in the end."""
    assert patience_s(20, 0, 0) == 20
    assert [patience_s(20, refusals, 5) for refusals in (1, 2, 3)] == [40, 80, 160]
    assert patience_s(20, 3, FORGET_S) == 20
