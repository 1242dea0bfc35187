"""Every kind of chat job, and every call, of a real engine comes to the same on another rank."""

import contextlib
import gc
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, fields, replace
from functools import partial
from typing import Any

import pytest

from gateway.engine.generation.engine import GenerationEngine
from gateway.engine.generation.sequences import Sequences
from gateway.jobs import RoutingKeys
from gateway.jobs.chat import Adapter, Calling, Function, GenerateJob, Grammar, Question, Sampling
from gateway.jobs.steps import SequenceParams, StepPlan, StepResult, Verdict
from gateway.serving import ports
from gateway.serving.ranks.calls import Call, DropCall, EngineCall, decode
from gateway.serving.ranks.following import FollowingEngine
from gateway.serving.ranks.leading import LeadingEngine
from tests.checkpoints import teach_thinking, write_chat, write_reciting
from tests.engine.generation.harness import open_engine
from tests.fakes import caller
from tests.sandboxes import sandbox

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
    "a message that the template begins": {"messages": HELLO},
    "an answer that is read whole": {"messages": HELLO},
    "calls and thoughts in an unknown form": {
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
    "thinking": {
        "messages": HELLO,
        "template_args": {"enable_thinking": True},
        "thinking_budget": 5,
    },
    "not thinking": {"messages": HELLO, "template_args": {"enable_thinking": False}},
    "questions": {
        "messages": [{"role": "user", "content": "It rains.\n"}],
        "questions": [Question(0, "Is it?", ["yes", "no"]), Question(1, "Or?", ["a", "ab"])],
    },
}


# What changes nothing in an engine is not sent.
NOT_SENT = {
    *("prepare", "compile", "matches_schema", "read_answer", "synchronize", "nbytes"),
    *("prefixes", "routing_keys"),
    *("tokens", "facts", "is_batched"),
}


def run_rows(engine: LeadingEngine, rows: Sequence[SequenceParams]) -> Iterator[StepResult]:
    """Join rows, numbered from 1, and yield the result of each pass until all have ended."""
    result = engine.step(StepPlan(joining=list(enumerate(rows, 1))))
    yield result
    while result.reading or result.decoding:
        for kind in ("prefill", "decode"):
            result = engine.step(StepPlan(kind=kind, token_budget=64))
            yield result


def count_sequences() -> int:
    """Count the sets of sequences in memory."""
    return sum(isinstance(each, Sequences) for each in gc.get_objects())


class Pair:
    """Two ranks of one process: rank 1's engine repeats each call after rank 0's own."""

    def __init__(self, open_one: Callable[[], GenerationEngine]) -> None:
        leader: Any = self
        self.other = open_one()
        self._following = FollowingEngine(self.other)
        self.engine = LeadingEngine(leader, "m", open_one())
        self.sent: set[str] = set()

    def send(self, frame: bytes) -> Call:
        call = decode(frame)
        self.sent.add(call.method)
        if isinstance(call, DropCall):
            self._following.close()
        return call

    def agree(self, call: EngineCall, outcome: str) -> None:
        assert self._following.make(call) == outcome, call

    def run(self, rows: Sequence[SequenceParams]) -> list[StepResult]:
        """Answer rows to their ends."""
        engine, ready = self.engine, []
        for row in rows:
            compiled = engine.compile(row.grammar) if row.grammar is not None else None
            max_tokens = min(row.max_tokens, 12)
            ready.append(replace(row, compiled=compiled, max_tokens=max_tokens))
        return list(run_rows(engine, ready))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Pair]]:
    """Return the two ranks that each job is for."""
    folder = tmp_path_factory.mktemp("jobs")
    thinking = teach_thinking(write_chat(folder / "thinking", vocab_size=1040), opens=True)
    plain = write_chat(folder / "plain")
    options: dict[str, Any] = {"prefix_cache_bytes": 1 << 24, "speculate_rows": 4}
    unknown = "{{ tools }}{{ messages }}{# reasoning_content #}"
    opening = "{% if add_generation_prompt %}<|channel|>final<|message|>{% endif %}"
    reciting = write_reciting(
        folder / "reciting",
        ["<|b|>", "Yes."],
        response_template={"start_anchor": "<|assistant|>", "fields": {"content": {}}},
    )
    others = {
        "an answer that is read whole": Pair(
            partial(open_engine, reciting, template_sandbox=sandbox("template"), **options)
        ),
        "thinking": Pair(partial(open_engine, thinking, **options)),
        "calls and thoughts in an unknown form": Pair(
            partial(open_engine, plain, chat_template=unknown, **options)
        ),
        "a message that the template begins": Pair(
            partial(
                open_engine,
                plain,
                chat_template=f"{{{{ messages }}}}{opening}",
                reasoning_parser="openai_gptoss",
                **options,
            )
        ),
    }
    pair = Pair(partial(open_engine, plain, **options))
    yield {name: others.get(name, pair) for name in JOBS}
    for each in (pair, *others.values()):
        each.engine.close()


@pytest.fixture(scope="module")
def rows(pairs: dict[str, Pair]) -> dict[str, list[SequenceParams]]:
    """Return the sequence params of each job."""
    return {name: prepare(pairs[name].engine, **job) for name, job in JOBS.items()}


def prepare(engine: LeadingEngine, **job: Any) -> list[SequenceParams]:
    names = RoutingKeys([b"\x00\xff"], 0.5)
    asking = replace(caller(), routing_keys=names, cache_salt="key-1")
    return engine.prepare(GenerateJob(**{"caller": asking, "sampling": Sampling(), **job}))


@pytest.mark.parametrize("name", JOBS)
def test_a_job_is_answered_alike_on_every_rank(
    name: str, pairs: dict[str, Pair], rows: dict[str, list[SequenceParams]]
) -> None:
    """The answers agree pass by pass to their ends, with drawn seeds and compiled grammars too."""
    pair = pairs[name]
    results = pair.run(rows[name])
    deltas = [delta for result in results for delta in result.deltas]
    assert not [delta.error for delta in deltas if delta.error is not None]
    ends = [delta.id for delta in deltas if delta.finish_reason is not None]
    assert sorted(ends) == list(range(1, 1 + len(rows[name])))
    end = pair.other.step(StepPlan())
    assert (end.reading, end.decoding) == (frozenset(), 0)
    assert not any(result.faults for result in results)


def test_every_call_that_changes_an_engine_is_made_on_every_rank(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = write_chat(tmp_path_factory.mktemp("calls"))
    pair = Pair(partial(open_engine, folder, prefix_cache_bytes=1 << 24))
    engine = pair.engine
    rows = list(enumerate(prepare(engine, messages=HELLO, n=5, max_tokens=12)))
    parked, preempted, left, capped, kept = range(5)
    engine.step(StepPlan(kind="prefill", token_budget=512, joining=rows))
    engine.step(StepPlan(kind="decode"))
    plan = StepPlan(parking=[parked], preempting=[preempted], leaving=[left], capped=[(capped, 1)])
    [end] = engine.step(plan).deltas
    assert (end.id, end.finish_reason) == (capped, "length")
    engine.step(StepPlan(kind="decode", clear_prefixes=True, resuming=[parked, preempted]))
    deltas = [delta for result in run_rows(engine, []) for delta in result.deltas]
    ends = {delta.id for delta in deltas if delta.finish_reason is not None}
    assert ends == {parked, preempted, kept}
    engine.probe()
    for verdict in engine.self_test():
        engine.apply_verdict(verdict)
    before = count_sequences()
    with contextlib.closing(engine.time_step(3)) as steps:
        while next(steps) is None:
            assert count_sequences() == before + 2, "each rank has sequences of its own for it"
    assert count_sequences() == before, "no rank keeps KV of a test whose times are known"
    engine.apply_verdict(Verdict(rows=False))
    assert engine.is_batched is pair.other.is_batched is False
    assert engine.prefixes is None, "a file would have one rank's part"
    engine.drop_adapter(1)
    engine.close()
    public = {name for name in vars(ports.GenerationEngine) if not name.startswith("_")}
    assert {
        method.replace("drop", "close", method == "drop") for method in pair.sent
    } == public - NOT_SENT - {"time_step"}, "which is a self_test of so many rows"


def test_no_kind_of_job_is_left_out(rows: dict[str, list[SequenceParams]]) -> None:
    """A new field of a job or of a sequence needs a job here that sets it, unless no shared model
    has a use for it.
    """
    asked = {name for job in JOBS.values() for name in job} | {"caller", "images"}
    assert asked == {field.name for field in fields(GenerateJob)}
    sent = [row for some in rows.values() for row in some]
    same = {field.name for field in fields(SequenceParams) if is_never_set(field, sent)}
    assert same == {"compiled", "images"}  # each rank compiles for itself


def is_never_set(field: Any, sent: Sequence[SequenceParams]) -> bool:
    """Return True if a field has its default in all of these."""
    return field.default is not MISSING and all(
        getattr(row, field.name) == field.default for row in sent
    )
