"""Calls as bytes: nothing but calls is read. test_jobs.py has the effects of each kind."""

import json
import pickle
from dataclasses import replace

import pytest

from gateway.errors import Fault, PassFault
from gateway.jobs.chat import Delta, Sampling
from gateway.jobs.steps import Pass, SequenceParams, StepPlan, StepResult
from gateway.serving.ranks.calls import StepCall, decode, digest, encode


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b'{"method": "step"}',
        b'{"method": "join", "model": "m"}',
        b'{"method": "probe", "model": "m", "path": "/"}',
        b'{"method": "load", "model": "m", "setup": {"spec": "", "files": ""}}',
        b'{"method": "drop_adapter", "model": "m", "number": "one"}',
        b"[" * 100_000,
        pickle.dumps([1]),
    ],
)
def test_what_is_no_call_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a call"):
        decode(data)


def test_a_compiled_grammar_is_not_sent() -> None:
    class OfThisProcess:
        unenforced = ()

    params = SequenceParams(prompt=[5], max_tokens=9, sampling=Sampling(), compiled=OfThisProcess())
    with pytest.raises(ValueError, match="Unable to serialize"):
        encode(StepCall("m", StepPlan(joining=[(7, params)])))


def test_the_digest_is_of_what_was_said() -> None:
    """Tokens, texts and ends count; a call's random id does not."""
    delta = Delta(0, "a", 1, id=1)
    result = StepResult([delta], Pass(1, 1, 1), decoding=1)
    one = digest(result)
    assert one == digest(replace(result, deltas=[replace(delta, cached_tokens=5)]))
    others = [
        digest(replace(result, decoding=2)),
        digest(replace(result, reading=frozenset({2}))),
        digest(replace(result, size=Pass(1, 2, 2))),
        digest(replace(result, deltas=[replace(delta, text="b")])),
        digest(replace(result, deltas=[replace(delta, id=2)])),
        digest(replace(result, deltas=[replace(delta, finish_reason="stop")])),
        digest(replace(result, deltas=[replace(delta, error="no")])),
        digest(replace(result, faults=[PassFault(Fault.ROW, "no")])),
    ]
    assert len({one, *others}) == 9
    assert json.dumps(one)
