"""The simulator against queues that have a closed form, and against laws that hold for any."""

from pathlib import Path

import pytest

from benchmarks.simulation.__main__ import BASE_M
from benchmarks.simulation.cluster import limits_of, simulate
from benchmarks.simulation.device import Curve, Device, read_device, write_device
from benchmarks.simulation.load import Mix, Request
from benchmarks.simulation.replica import Limits
from benchmarks.simulation.tables import cell
from gateway.bench.figures import Window
from gateway.settings import Settings

PASS_S, STEP_S, READ_S = 0.02, 0.01, 0.05
FLAT = Device(
    name="flat",
    embedding=Curve([1, 10_000], [PASS_S, PASS_S]),
    prefill=Curve([1, 10_000], [READ_S, READ_S]),
    decode=Curve([1, 10_000], [STEP_S, STEP_S]),
    turn_s=0.0,
    embedding_s=0.0,
    chat_s=0.0,
    token_s=0.0,
)
EMBEDDINGS = Mix(chats=0)


def limits(**settings: object) -> Limits:
    return limits_of(Settings(_env_file=None, **settings))  # type: ignore[call-arg, arg-type]


@pytest.mark.parametrize("sizes", [[], [2, 1], [1, 1]])
def test_a_curve_that_does_not_rise_is_refused(sizes: list[float]) -> None:
    with pytest.raises(ValueError, match="curve"):
        Curve(sizes, [0.1] * len(sizes))


@pytest.mark.parametrize("busy", [0.3, 0.5, 0.7])
def test_without_batching_the_wait_is_that_of_an_m_d_1_queue(busy: float) -> None:
    """Pollaczek and Khinchine: the mean wait is busy / (2 (1 - busy)) services."""
    alone = limits(embedding_max_batch_size=1, queue_max_tokens=10**6)
    waits: list[float] = []
    requests = list(EMBEDDINGS.requests(busy / PASS_S, 120, seed=3))
    found = simulate(FLAT, requests, Window(0, 200), limits=alone, answered=waits.append)
    assert found.embeddings.requests == len(requests)
    mean_s = sum(waits) / len(waits) - PASS_S
    assert mean_s == pytest.approx(PASS_S * busy / (2 * (1 - busy)), rel=0.15)


def test_a_lone_chat_takes_its_prompt_and_its_steps() -> None:
    window = Window(0.0, 10.0)
    chat = Request(0.0, 40, 11)
    found = simulate(FLAT, [chat], window, limits=limits()).chats
    assert found.first is not None
    assert found.latency is not None
    assert found.first.p50 == pytest.approx(READ_S)  # the first token comes with it
    assert found.latency.p50 == pytest.approx(READ_S + 10 * STEP_S)


def test_two_kinds_that_always_wait_share_the_lane_by_their_weights() -> None:
    """Passes of 20 ms and steps of 10 ms: of equal time, twice as many steps."""

    def flood(weight: float) -> tuple[float, float]:
        shares = limits(lane_weight_embedding=weight, queue_max_tokens=10**9)
        chats = [Request(0.0, 40, 10**4) for _ in range(8)]
        texts = [Request(0.5, 20) for _ in range(32 * 200)]
        found = simulate(FLAT, [*chats, *texts], Window(1.0, 3.0), limits=shares)
        return found.embeddings.requests_per_s / 32 * PASS_S, found.offered_per_s

    assert flood(1)[0] == pytest.approx(0.5, abs=0.06)
    assert flood(3)[0] == pytest.approx(0.75, abs=0.06)


def test_what_is_in_flight_is_the_rate_times_the_time() -> None:
    """Little's law, over a run that begins and ends empty."""
    spent: list[float] = []
    requests = list(Mix(chats=0.2).requests(30, 60, seed=5))
    simulate(FLAT, requests, Window(0.0, 1e6), limits=limits(), answered=spent.append)
    marks = [(each.arrived, 1) for each in requests]
    marks += [(each.ended, -1) for each in requests if each.ended is not None]
    area, held, before = 0.0, 0, 0.0
    for moment, change in sorted(marks):
        area += held * (moment - before)
        held, before = held + change, moment
    assert held == 0
    assert area == pytest.approx(sum(spent))


def test_a_full_queue_refuses() -> None:
    chats = [Request(0.0, 40, 64) for _ in range(300)]
    found = simulate(FLAT, chats, Window(0.0, 1e3), limits=limits())
    assert found.refused == 300 - 256
    assert cell(found) == "full"


def test_a_device_reads_as_it_was_written(tmp_path: Path) -> None:
    write_device(FLAT, tmp_path / "flat.json", sources={"all": "none"})
    assert read_device(tmp_path / "flat.json") == FLAT
    assert read_device(BASE_M).rows == 8
