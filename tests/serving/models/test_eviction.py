"""The plan of admissions and evictions, with numbers."""

from typing import Any

from gateway.serving.models.eviction import EvictionPlan, Phase, Resident, make_plan, pick

WAITING, USED, IDLE, LEAVING = Phase


def plan(
    free: int, rows: int = 0, *, places: int = 9, prefixes: int = 0, **residents: Any
) -> EvictionPlan[str]:
    """EvictionPlan for residents, given as they are or as (phase, bytes, last used)."""
    given = {
        name: resident if isinstance(resident, Resident) else Resident(*resident)
        for name, resident in residents.items()
    }
    return make_plan(
        given,
        max_models=places,
        free_bytes=free,
        rows_bytes=rows + prefixes,
        prefix_bytes=prefixes,
    )


def test_a_model_that_fits_is_admitted() -> None:
    assert plan(20, a=(WAITING, 10), b=(WAITING, 10)) == EvictionPlan(admitted=("a", "b"))


def test_nobody_overtakes_a_model_that_waits() -> None:
    assert plan(10, a=(LEAVING, 10), b=(WAITING, 20), c=(WAITING, 5)).admitted == ()
    assert plan(10, a=(USED, 30), b=(WAITING, 20), c=(WAITING, 5)).admitted == ()
    assert plan(25, places=1, a=(USED, 0), b=(WAITING, 20)).admitted == ()


def test_the_idle_model_used_longest_ago_leaves_and_no_more_than_need_be() -> None:
    idle: dict[str, Any] = {"a": (IDLE, 10, 3.0), "b": (IDLE, 30, 1.0), "c": (IDLE, 50, 2.0)}
    assert plan(0, **idle, d=(WAITING, 5)).leaving == ("b",)
    assert plan(0, **idle, d=(WAITING, 31)).leaving == ("b", "c")
    assert plan(5, places=3, **idle, d=(WAITING, 5)).leaving == ("b",)


def test_nobody_leaves_where_all_that_could_would_not_suffice() -> None:
    """Evicting is in vain: the memory belongs to models in use, loading or pinned."""
    assert plan(0, a=(IDLE, 10), b=(USED, 90), c=(WAITING, 20)) == EvictionPlan()


def test_a_model_that_is_leaving_is_waited_for() -> None:
    assert plan(5, a=(LEAVING, 10), b=(IDLE, 10), c=(WAITING, 12)) == EvictionPlan(claimed_bytes=2)


def test_bytes_freed_for_a_model_and_free_ones_are_kept_from_rows() -> None:
    expected: EvictionPlan[str] = EvictionPlan(leaving=("a",), claimed_bytes=10)
    assert plan(15, a=(IDLE, 10), b=(WAITING, 20)) == expected


def test_kept_prompts_go_before_an_idle_model() -> None:
    """Prefixes are claimed; a model leaves only for bytes beyond them, or for a place."""
    idle: dict[str, Any] = {"a": (IDLE, 10, 1.0), "b": (IDLE, 10, 2.0)}
    expected: EvictionPlan[str] = EvictionPlan(claimed_bytes=30)
    assert plan(5, prefixes=25, **idle, c=(WAITING, 30)) == expected
    both: EvictionPlan[str] = EvictionPlan(leaving=("a",), claimed_bytes=30)
    assert plan(5, prefixes=25, **idle, c=(WAITING, 40)) == both
    place: EvictionPlan[str] = EvictionPlan(leaving=("a",), claimed_bytes=20)
    assert plan(5, places=2, prefixes=25, **idle, c=(WAITING, 30)) == place


def test_bytes_that_rows_give_back_are_waited_for() -> None:
    expected: EvictionPlan[str] = EvictionPlan(claimed_bytes=20)
    assert plan(5, rows=30, a=(USED, 60), b=(WAITING, 20)) == expected


def test_rows_are_held_back_only_where_their_bytes_suffice() -> None:
    """A place is lacking, or the bytes of a model in use: its answers go on as before."""
    assert plan(5, rows=30, places=1, a=(USED, 60), b=(WAITING, 20)).claimed_bytes == 0
    assert plan(5, rows=10, a=(USED, 60), b=(WAITING, 20)).claimed_bytes == 0


def test_a_model_that_nobody_asks_for_any_more_takes_idle_models_room_alone() -> None:
    """Its caller hung up, or gave up: it is abandoned where models in use have it."""
    uncalled = Resident(WAITING, 10, is_requested=False)
    assert plan(0, a=(IDLE, 10), b=uncalled).leaving == ("a",)
    given = plan(5, rows=50, a=(USED, 10), b=uncalled, c=(WAITING, 5))
    assert given == EvictionPlan(admitted=("c",), abandoned=("b",))


def test_two_that_wait_are_counted_together() -> None:
    given = plan(0, a=(IDLE, 10), b=(USED, 10), c=(WAITING, 10), d=(WAITING, 10))
    assert given.leaving == ("a",)


def test_an_adapter_is_admitted_before_a_model_that_waits_for_its_base() -> None:
    """It holds the base, whichever came first: else neither could go on. It takes no place."""
    one = Resident(WAITING, 10, is_adapter=True)
    assert plan(50, places=1, a=(USED, 90), b=(WAITING, 90), one=one).admitted == ("one",)
    assert plan(10, a=(USED, 90), b=(WAITING, 90), one=one).admitted == ("one",)


def test_pick_takes_as_many_as_are_needed() -> None:
    idle = {
        "a": Resident(IDLE, 10, 1.0, is_adapter=True),
        "b": Resident(IDLE, 30, 2.0),
        "c": Resident(IDLE, 50, 3.0),
    }
    assert pick(idle, places=0, nbytes=0) == []
    assert pick(idle, places=-1, nbytes=5) == ["a"]
    assert pick(idle, places=-1, nbytes=11) == ["a", "b"]
    assert pick(idle, places=1, nbytes=0) == ["b"]
    assert pick(idle, places=0, nbytes=1000) == ["a", "b", "c"]
