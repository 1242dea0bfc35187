"""Every kind of chat job, as a real engine prepares it, arrives at the other ranks."""

import json
from collections.abc import Sequence
from dataclasses import MISSING, fields, replace
from typing import Any

import pytest

from gateway.engine.generation.engine import GenerationEngine
from gateway.jobs import (
    Adapter,
    Beginning,
    Calling,
    Function,
    GenerateJob,
    Grammar,
    Question,
    Sampling,
    SequenceParams,
)
from gateway.serving.ranks.calls import Call, decode, encode
from tests.checkpoints import teach_thinking, write_chat
from tests.engine.generation.test_engine import open_engine
from tests.fakes import caller

HELLO = [{"role": "user", "content": "Hello"}]
FUNCTION = Function("look", {"type": "object", "properties": {}}, strict=True)
TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": dict(FUNCTION.parameters)}}
]
CALLED = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": {}}}
JOBS: dict[str, dict[str, Any]] = {
    "a conversation": {"messages": HELLO, "n": 2, "adapter": Adapter(1, "tuned", 5)},
    "sampling": {
        "messages": HELLO,
        "sampling": Sampling(logit_bias={3: -1.5}, stop_token_ids=frozenset({4}), seed=1 << 63),
        "logprobs": 2,
        "stop": ["a", "b"],
        "max_tokens": 5,
    },
    "a text, echoed": {"prompt": "Hello there", "echo": True},
    "ids": {"prompt": (5, 6, 7)},
    "a form": {"messages": HELLO, "grammar": Grammar("json_schema", json.dumps({}))},
    "tools": {
        "messages": [
            *HELLO,
            {"role": "assistant", "content": "", "tool_calls": [CALLED]},
            {"role": "tool", "content": "7", "tool_call_id": "call_1"},
        ],
        "calling": Calling(functions=[FUNCTION]),
        "tools": TOOLS,
    },
    "calls in an unknown form": {
        "messages": HELLO,
        "calling": Calling(functions=[replace(FUNCTION, strict=False)]),
        "tools": TOOLS,
    },
    "a forced call": {
        "messages": HELLO,
        "calling": Calling(functions=(FUNCTION,), forced=True),
        "tools": TOOLS,
    },
    "continued": {"messages": [*HELLO, {"role": "assistant", "content": "Yes"}], "continues": True},
    "thinking": {"messages": HELLO, "template_args": {"enable_thinking": True}},
    "not thinking": {"messages": HELLO, "template_args": {"enable_thinking": False}},
    "questions": {
        "messages": [{"role": "user", "content": "It rains.\n"}],
        "questions": [Question(0, "Is it?", ["yes", "no"]), Question(1, "Or?", ["a", "ab"])],
    },
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[SequenceParams]]:
    """Return what each job's sequences are."""
    folder = tmp_path_factory.mktemp("jobs")
    thinking = teach_thinking(write_chat(folder / "thinking", vocab_size=1040), opens=True)
    plain = write_chat(folder / "plain")
    engine = open_engine(plain)
    others = {
        "thinking": open_engine(thinking),
        "calls in an unknown form": open_engine(plain, chat_template="{{ tools }}{{ messages }}"),
    }
    return {name: prepare(others.get(name, engine), **job) for name, job in JOBS.items()}


def prepare(engine: GenerationEngine, **job: Any) -> list[SequenceParams]:
    asking = replace(caller(), beginning=Beginning([b"\x00\xff"], 0.5))
    return engine.prepare(GenerateJob(**{"caller": asking, "sampling": Sampling(), **job}))


@pytest.mark.parametrize("name", JOBS)
def test_a_job_arrives_as_it_was_sent(name: str, rows: dict[str, list[SequenceParams]]) -> None:
    """Whatever sequence of ids its prompt is: that of a question's step is made of parts."""
    for sent in rows[name]:
        [arrived] = decode(encode(Call("m", "join", [sent]))).arguments
        assert list(arrived.prompt) == list(sent.prompt)
        assert replace(arrived, prompt=sent.prompt) == sent


def test_no_kind_of_job_is_left_out(rows: dict[str, list[SequenceParams]]) -> None:
    """A new field of a job or of a sequence needs a job here that sets it."""
    asked = {name for job in JOBS.values() for name in job} | {"caller"}
    assert asked == {field.name for field in fields(GenerateJob)}
    sent = [row for some in rows.values() for row in some]
    same = {field.name for field in fields(SequenceParams) if is_never_set(field, sent)}
    assert same == {"compiled"}  # which each rank does for itself


def is_never_set(field: Any, sent: Sequence[SequenceParams]) -> bool:
    """Return True if a field has its default in all of these."""
    return field.default is not MISSING and all(
        getattr(row, field.name) == field.default for row in sent
    )
