"""The order in which choices join a batch, with numbers."""

import asyncio

from gateway.jobs import Tier
from gateway.jobs.chat import Grammar, Sampling
from gateway.jobs.steps import SequenceParams
from gateway.serving.budget import Budget
from gateway.serving.generation.choice import Choice
from gateway.serving.generation.memory import RowCosts, RowMemory
from gateway.serving.generation.policy import (
    Batch,
    GenerationLimits,
    choose_rotation,
    prefill_goes_first,
)
from gateway.serving.generation.queue import rank
from tests.serving.generation.simulated import PAIRS


def test_a_tier_is_worth_a_head_start_and_no_more() -> None:
    """Nobody starves: a row that waits longer than that is not overtaken."""
    assert rank(10.0, Tier.PRIORITY, 5) < rank(6.0, Tier.DEFAULT, 5) < rank(2.0, Tier.FLEX, 5)
    assert rank(12.0, Tier.PRIORITY, 5) > rank(6.0, Tier.DEFAULT, 5)
    assert rank(0.0, Tier.FLEX, 5) < rank(6.0, Tier.DEFAULT, 5)


def test_a_burst_is_read_before_it_is_answered_and_for_so_long() -> None:
    """A step costs nearly as much for a few rows as for many; those that run wait for a bound."""
    assert prefill_goes_first(soon=31, decoding=1, waited_s=0.2, bound_s=0.5)
    assert not prefill_goes_first(soon=31, decoding=1, waited_s=0.5, bound_s=0.5)
    assert not prefill_goes_first(soon=16, decoding=16, waited_s=0, bound_s=0.5)
    assert not prefill_goes_first(soon=1, decoding=1, waited_s=0, bound_s=0.5), "a long prompt"


def rotated(runs: list[int | None], bound: str = "") -> tuple[list[int], list[int]]:
    """Return which sequences are parked and which resume, by number: of those that have run for so
    long, None for the held ones, at a width of two. Those in `bound` have a grammar.
    """
    choices = []
    for number, run in enumerate(runs, 1):
        grammar = Grammar("regex", "a") if str(number) in bound else None
        params = SequenceParams(prompt=[1], max_tokens=99, sampling=Sampling(), grammar=grammar)
        choice = Choice(params, asyncio.Queue(), id=number, tokens=run or 0, is_held=run is None)
        choices.append(choice)
    limits = GenerationLimits(max_batch_size=32, prefill_chunk_tokens=512)
    held = [choice for choice in choices if choice.is_held]
    memory = RowMemory(Budget(0), RowCosts())
    rotation = choose_rotation(Batch(limits, memory, choices, held, step_s=PAIRS))
    parking, resuming = rotation.parking, rotation.resuming
    return [choice.id for choice in parking], [choice.id for choice in resuming]


def test_who_has_run_for_longest_stops_once_the_runs_of_all_have_ended() -> None:
    assert rotated([8, 3, None]) == ([], []), "the others' is not over"
    assert rotated([8, 16, None]) == ([2], [3])
    assert rotated([8, 16, None, None, None]) == ([2, 1], [3, 4])
    assert rotated([3, None, None]) == ([], [2]), "a place was free"
    assert rotated([9, 1, 5, 2]) == ([4, 2], []), "two that decode are too many"
    assert rotated([9, 8, 11, None]) == ([3, 1], [4])


def test_who_has_no_place_for_its_grammar_keeps_nobody_behind_it_waiting() -> None:
    assert rotated([3, None, None], bound="12") == ([], [3])
    assert rotated([8, 8, None, None], bound="13") == ([1, 2], [3, 4])
    assert rotated([8, 9, None, None, None], bound="134") == ([1, 2], [3, 5])
