"""Decisions over numbers: what is allowed where, and what a parting is."""

import math
from dataclasses import replace

import pytest

from gateway.doctor import findings
from gateway.doctor.findings import Parting, Tolerance, find_parting, tolerance
from gateway.engine.generation.self_test import BOUNDS
from gateway.jobs import Likelihood, TokenLogprob, Verdict

EXACT = Tolerance(logits=1e-2, distance=1e-3, tie_nats=1e-3)


def token(text: str, logprob: float = -0.1, **others: float) -> TokenLogprob:
    """A chosen token, and other likely ones by their logprobs."""
    chosen = Likelihood(text, text.encode(), logprob)
    rest = [Likelihood(other, other.encode(), each) for other, each in others.items()]
    return TokenLogprob(chosen, [chosen, *rest])


def test_float32_on_a_cpu_is_held_to_next_to_nothing() -> None:
    """All else to the engine's bounds, with a tie as wide as those let two logits drift."""
    assert tolerance("cpu", "float32", 1e-2) == EXACT
    ties = {
        str(dtype): tolerance("metal", "any", bound).tie_nats for dtype, bound in BOUNDS.items()
    }
    assert [round(each, 2) for each in ties.values()] == [0.05, 0.15, 0.49]
    assert tolerance("cpu", "bfloat16", 0.1) == tolerance("cuda", "bfloat16", 0.1)
    assert tolerance("metal", "float16", 3e-2).distance == 3e-2


def test_vectors_at_the_bound_pass_and_beyond_it_fail() -> None:
    """No number is within any bound."""
    assert findings.judge_vectors(1e-3, 6, EXACT).state == "ok"
    assert findings.judge_vectors(1.1e-3, 6, EXACT).state == "fail"
    assert findings.judge_vectors(math.nan, 6, EXACT).state == "fail"
    assert findings.judge_texts_together(math.inf, 6, EXACT).state == "fail"


def test_answers_part_at_the_first_other_token() -> None:
    """By what the one alone thought of it."""
    alone = [token("a"), token("b", -0.7, c=-0.9), token("d")]
    assert find_parting(alone, alone) is None
    beside = [token("a", -0.11), token("c", -0.8), token("x")]
    found = find_parting(alone, beside)
    assert found is not None
    assert found.token == 1
    assert found.nats == pytest.approx(0.2)


def test_a_token_that_was_never_likely_is_infinitely_far() -> None:
    """So is an end where the other goes on."""
    alone = [token("a"), token("b", -0.7, c=-0.9)]
    assert find_parting(alone, [token("a"), token("z")]) == Parting(1, math.inf)
    assert find_parting(alone, [token("a")]) == Parting(1, math.inf)


def test_only_partings_beyond_a_tie_fail() -> None:
    """The worst is named."""
    tie, wrong = Parting(3, 0.0005), Parting(7, 2.0)
    assert findings.judge_greedy([tie, None], 24, 5, EXACT).state == "ok"
    found = findings.judge_greedy([tie, wrong, Parting(9, 1.0)], 24, 5, EXACT)
    assert found.state == "fail"
    assert "from token 7 on, 2 nats less likely alone; a tie is 0.001 nats" in found.said
    assert findings.judge_greedy([Parting(0, math.nan)], 24, 5, EXACT).state == "fail"


def test_a_self_test_that_ran_out_of_memory_is_a_warning() -> None:
    """It says nothing of batches."""
    short = Verdict(rows=False, problem="rows: [malloc] no", is_lasting=False)
    wrong = replace(short, is_lasting=True)
    assert findings.judge_rows_together(short, EXACT).state == "warn"
    assert findings.judge_rows_together(wrong, EXACT).state == "fail"


def test_a_cut_answer_of_a_model_that_thinks_is_a_warning() -> None:
    """Its form would have come after the thoughts."""
    schema = {"type": "object"}
    cut = findings.judge_structured("", schema, is_whole=False, may_think=True)
    assert cut.state == "warn"
    assert findings.judge_structured("", schema, is_whole=False, may_think=False).state == "fail"
    assert findings.judge_structured("{}", schema, is_whole=True, may_think=True).state == "ok"


def test_a_little_memory_may_stay() -> None:
    """What a device keeps of what it has compiled, and less than held before is no fault."""
    slack = findings.SLACK_BYTES
    assert findings.judge_memory(8, 1000, 1000 + slack, 8 + slack).state == "ok"
    assert findings.judge_memory(8, 1000, 1001 + slack, 8).state == "fail"
    assert findings.judge_memory(8, 1000, 1000, 9 + slack).state == "fail"
    assert findings.judge_memory(100, 1000, 900, 0).state == "ok"
