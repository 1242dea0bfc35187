"""Percentiles and windows, by numbers."""

import pytest

from gateway.bench.figures import Answer, Spread, Window, measure, percentile


@pytest.mark.parametrize(
    ("values", "percent", "found"),
    [
        ([7.0], 99, 7.0),
        ([1.0, 2.0], 50, 1.0),
        ([1.0, 2.0], 51, 2.0),
        ([3.0, 1.0, 2.0], 50, 2.0),
        ([float(n) for n in range(1, 101)], 95, 95.0),
        ([float(n) for n in range(1, 21)], 99, 20.0),
        ([1.0, 2.0], 0, 1.0),
    ],
)
def test_a_percentile_is_a_value_that_was_measured(
    values: list[float], percent: float, found: float
) -> None:
    """Nearest rank: nothing is interpolated."""
    assert percentile(values, percent) == found


def test_requests_count_where_they_end() -> None:
    answers = [Answer(started, started + 1.0, units=2) for started in (0.5, 1.5, 2.0, 3.5)]
    figures = measure(answers, Window(2.0, 4.0))
    assert figures.requests == 2
    assert figures.requests_per_s == 1
    assert figures.units_per_s == 2
    assert figures.latency == Spread(1.0, 1.0, 1.0)
    assert figures.first is None
    assert figures.errors == {}


@pytest.mark.parametrize("start", [2.0, 2.5, 2.9])
def test_units_count_by_the_share_of_their_time(start: float) -> None:
    answers = [Answer(float(n), n + 1.0, units=32) for n in range(8) for _ in range(4)]
    assert measure(answers, Window(start, start + 2.7)).units_per_s == pytest.approx(128)


def test_tokens_of_a_stream_count_where_they_arrive() -> None:
    answer = Answer(0.0, 10.0, arrivals=[float(n) for n in range(10)], units=20)
    figures = measure([answer], Window(2.0, 4.0))
    assert figures.requests == 0
    assert figures.latency is None
    assert figures.units_per_s == 2.0


def test_the_first_token_is_timed_where_it_arrives() -> None:
    answers = [Answer(0.0, 9.0, [0.5, 8.0], 2), Answer(1.0, 9.0, [2.5, 8.0], 2)]
    assert measure(answers, Window(2.0, 4.0)).first == Spread(1.5, 1.5, 1.5)


def test_errors_count_by_name_wherever_they_fall() -> None:
    answers = [
        Answer(0.0, 0.1, error="429 rate_limit_exceeded"),
        Answer(2.0, 2.1, error="429 rate_limit_exceeded"),
        Answer(2.0, 2.1, [2.05], error="stream without [DONE]"),
    ]
    figures = measure(answers, Window(2.0, 4.0))
    assert figures.errors == {"429 rate_limit_exceeded": 2, "stream without [DONE]": 1}
    assert figures.units_per_s == figures.requests == 0
