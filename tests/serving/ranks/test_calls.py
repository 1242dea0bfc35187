"""Calls as bytes: nothing is lost on the way, and nothing but calls is read."""

import json
import pickle
from dataclasses import replace

import pytest

from gateway.errors import Fault, PassFault
from gateway.jobs import (
    Calling,
    Delta,
    Function,
    Grammar,
    LabelStep,
    Pass,
    Sampling,
    SchemaRule,
    SequenceParams,
    StepPlan,
    StepResult,
    Verdict,
)
from gateway.serving.ranks.calls import (
    Call,
    DropAdapterCall,
    DropCall,
    LoadCall,
    ProbeCall,
    SelfTestCall,
    Setup,
    StepCall,
    VerdictCall,
    decode,
    digest,
    encode,
)

WHOLE = SequenceParams(
    prompt=[5, 6, 7],
    max_tokens=9,
    sampling=Sampling(
        temperature=0.1,
        logit_bias={3: -100.0, 9: 0.5},
        seed=(1 << 64) - 1,
        stop_token_ids=frozenset({4, 2}),
        unset=frozenset({"top_p"}),
    ),
    stop=["\u2028", "é"],
    logprobs=2,
    echoed=["a", ""],
    calling=Calling(functions=[Function("f", {"type": "object", "x": [1, None, True]})]),
    grammar=Grammar("calls", "start: x", True, (SchemaRule("r", "f", "{}", True),)),
    step=LabelStep(1, [([1, 2], [0])], is_first=True),
    beginning=[(3, b"\x00\xff")],
)


@pytest.mark.parametrize(
    "call",
    [
        LoadCall("m", Setup("a", "b", 1 << 40, 2)),
        DropCall("m"),
        StepCall("m", StepPlan(joining=[(7, WHOLE)])),
        StepCall("m", StepPlan(kind="prefill", token_budget=512, leaving=[1], capped=[(2, 3)])),
        VerdictCall("m", Verdict(single=True, rows=False)),
        SelfTestCall("m", is_first=True),
        DropAdapterCall("m", 3),
        ProbeCall("m"),
    ],
)
def test_a_call_arrives_as_it_was_sent(call: Call) -> None:
    """A sequence may come as another kind of sequence."""
    arrived = decode(encode(call))
    assert type(arrived) is type(call)
    assert encode(arrived) == encode(call)


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

    params = replace(WHOLE, compiled=OfThisProcess())
    with pytest.raises(ValueError, match="Unable to serialize"):
        encode(StepCall("m", StepPlan(joining=[(7, params)])))


def test_the_digest_is_of_what_was_said() -> None:
    """Tokens, texts and ends count; a call's random id does not."""
    delta = Delta(0, "a", 1, row=1)
    result = StepResult([delta], Pass(1, 1, 1), decoding=1)
    one = digest(result)
    assert one == digest(replace(result, deltas=[replace(delta, cached_tokens=5)]))
    others = [
        digest(replace(result, decoding=2)),
        digest(replace(result, reading=frozenset({2}))),
        digest(replace(result, size=Pass(1, 2, 2))),
        digest(replace(result, deltas=[replace(delta, text="b")])),
        digest(replace(result, deltas=[replace(delta, row=2)])),
        digest(replace(result, deltas=[replace(delta, finish_reason="stop")])),
        digest(replace(result, deltas=[replace(delta, error="no")])),
        digest(replace(result, faults=[PassFault(Fault.ROW, "no")])),
    ]
    assert len({one, *others}) == 9
    assert json.dumps(one)
