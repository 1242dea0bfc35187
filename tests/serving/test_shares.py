"""Fair shares of the lane, and the length of a pass, with numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.serving.lane import (
    LEAST_TOKENS,
    MOST_GROWTH,
    START_TOKENS,
    FairQueue,
    Pace,
    allowed_tokens,
)


def serve(shares: FairQueue, waiting: list[str], costs: dict[str, float], turns: int) -> list[str]:
    """Let kinds that always wait take turns."""
    served = []
    for _ in range(turns):
        kind = waiting[shares.choose(waiting)]
        shares.begin(kind)
        shares.end(kind, costs[kind])
        served.append(kind)
    return served


def test_kinds_of_equal_weight_get_equal_time_however_long_their_turns_are() -> None:
    """A decode step of 10 ms comes four times for each pass of 40 ms."""
    served = serve(FairQueue({}), ["embedding", "decode"], {"embedding": 0.04, "decode": 0.01}, 50)
    assert served.count("decode") == 4 * served.count("embedding")


def test_weights_divide_the_time() -> None:
    shares = FairQueue({"decode": 2.0})
    served = serve(shares, ["prefill", "decode"], {"prefill": 0.01, "decode": 0.01}, 30)
    assert served.count("decode") == 2 * served.count("prefill")


def test_idleness_saves_nothing_up() -> None:
    shares = FairQueue({})
    serve(shares, ["decode"], {"decode": 0.01}, 1000)
    served = serve(shares, ["decode", "embedding"], {"decode": 0.01, "embedding": 0.01}, 10)
    assert served.count("embedding") == 5


def test_a_load_of_minutes_counts_as_a_second() -> None:
    shares = FairQueue({}, {"load": 1.0})
    costs = {"load": 300.0, "decode": 0.1}
    served = serve(shares, ["load", "decode"], costs, 30)
    assert served.count("load") == 3


@pytest.mark.parametrize("seconds", [0.5, 3.0, 30.0])
def test_every_other_turn_counts_in_full(seconds: float) -> None:
    """Passes of half a minute beside decoding get half of the time, as short ones do."""
    costs = {"embedding": seconds, "decode": 0.05}
    served = serve(FairQueue({}, {"load": 1.0}), ["embedding", "decode"], costs, 5000)
    spent = {kind: served.count(kind) * cost for kind, cost in costs.items()}
    assert spent["embedding"] / sum(spent.values()) == pytest.approx(0.5, abs=0.1)


def test_a_turn_goes_on_until_it_has_had_what_the_other_had() -> None:
    """Steps of 1 ms, after a pass of 20 ms: twenty of them."""
    shares = FairQueue({})
    shares.begin("decode")
    shares.end("decode", 0)
    shares.begin("embedding")
    shares.end("embedding", 0.020)
    shares.begin("decode")
    assert not shares.is_up("decode", 0.019, ["embedding"])
    assert shares.is_up("decode", 0.021, ["embedding"])
    assert shares.is_up("decode", 0.001, ["embedding", "decode"])
    assert not shares.is_up("decode", 0.001, [])


@given(
    st.lists(st.sampled_from("abcd"), min_size=1, unique=True),
    st.dictionaries(st.sampled_from("abcd"), st.floats(0.1, 10)),
    st.data(),
)
def test_nobody_starves(waiting: list[str], weights: dict[str, float], data: st.DataObject) -> None:
    """Each kind that waits has a turn between two of another, if its last one cost no more."""
    costs = {kind: data.draw(st.floats(0.001, 1.0)) for kind in waiting}
    served = serve(FairQueue(weights), waiting, costs, 400)
    paid = {kind: costs[kind] / weights.get(kind, 1.0) for kind in waiting}
    for kind in waiting:
        given_s = served.count(kind) * paid[kind]
        for other in waiting:
            assert given_s <= served.count(other) * paid[other] + paid[kind] + paid[other] + 1e-9


def test_of_equals_the_first_to_wait_is_next() -> None:
    assert FairQueue({}).choose(["b", "a", "c"]) == 0


@pytest.mark.parametrize(
    ("before", "tokens", "seconds", "after"),
    [
        (16_384, 16_384, 4.0, 1024),  # it took too long: at once the next is shorter
        (512, 512, 0.2, 640),
        (512, 512, 0.1, 1280),  # it was quick: the next may be longer
        (512, 512, 0.001, MOST_GROWTH * 512),  # yet not many times as long
        (2000, 8, 0.02, 2000),  # a small quick pass tells nothing of large ones
        (55, 5, 0.17, 55),  # nor the end of a prompt, on a slow machine
        (2000, 8, 0.5, 1000),  # a small slow one halves at most: a kernel was compiled
        (512, 255, 0.25, 256),  # this slow one was half of what it might have been
        (512, 512, 1000, LEAST_TOKENS),  # never nothing
        (512, 0, 0.1, 512),  # no tokens
    ],
)
def test_what_a_pass_took_tells_how_much_fits_in_the_next(
    before: int, tokens: int, seconds: float, after: float
) -> None:
    assert allowed_tokens(before, tokens, seconds, 0.25) == after


@given(st.floats(200, 100_000), st.floats(0, 0.05))
def test_passes_become_as_long_as_they_may_be(tokens_a_second: float, overhead_s: float) -> None:
    """This holds on each device.

    After a few full passes none is much longer than the limit, nor shorter than need be.
    """
    pace = Pace(0.25)
    assert pace.tokens == START_TOKENS
    for _ in range(12):
        seconds = overhead_s + pace.tokens / tokens_a_second
        pace.note(pace.tokens, seconds)
    seconds = overhead_s + pace.tokens / tokens_a_second
    assert seconds == pytest.approx(0.25, rel=0.35)
