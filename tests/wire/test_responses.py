"""Responses requests → jobs, and deltas → items and events."""

import warnings
from collections.abc import Sequence
from typing import Any

import orjson
import pytest

from gateway.errors import BadRequest, EngineFailed, Overloaded, UnknownParameter
from gateway.jobs import Tier
from gateway.jobs.chat import (
    CallDelta,
    Delta,
    GenerateJob,
    Grammar,
    Likelihood,
    Sampling,
    TokenLogprob,
    Usage,
)
from gateway.wire.generation import read_tier
from gateway.wire.responses import ResponsesRequest, new_response, to_job
from gateway.wire.responses_items import AnyItem, dump_items, read_item, to_messages
from gateway.wire.responses_stream import ResponseWriter
from gateway.wire.tools import unpack
from gateway.wire.validation import read_request
from tests.fakes import caller

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Tells it.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}
CLOCK = {"type": "function", "name": "clock", "parameters": None}
CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city":"Ulm"}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "rain"}


def read(given: Any = "hi", **fields: Any) -> ResponsesRequest:
    body = orjson.dumps({"model": "m", "input": given, **fields})
    return read_request(body, ResponsesRequest, strict=False).request


def job(given: Any = "hi", **fields: Any) -> GenerateJob:
    asked = read(given, **fields)
    sampling = Sampling(temperature=0.3)
    given = {"items": asked.input, "max_tokens": 50, "template_args": {"a": 1}, "max_chars": 1000}
    return to_job(asked, caller(), sampling, **given)


def refused(given: Any = "hi", **fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        job(given, **fields)
    return caught.value


def test_a_text_is_a_users_message_after_the_instructions() -> None:
    system = {"role": "system", "content": "Be brief."}
    assert job(instructions="Be brief.").messages == [system, {"role": "user", "content": "hi"}]


def test_items_become_a_conversation() -> None:
    """Calls join the assistant's turn, outputs find their call."""
    said = {"type": "output_text", "text": "Well:", "annotations": []}
    message = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed"}
    turns = job(
        [
            {"role": "developer", "content": "Be brief."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": None},
            {**message, "content": [said]},
            CALL,
            {**CALL, "call_id": "c2", "arguments": ""},
            OUTPUT,
            {**OUTPUT, "call_id": "c2", "output": [{"type": "input_text", "text": "sun"}]},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        ]
    ).messages
    calls = [
        {"id": name, "type": "function", "function": {"name": "weather", "arguments": arguments}}
        for name, arguments in (("c1", {"city": "Ulm"}), ("c2", {}))
    ]
    assert turns == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "Well:", "tool_calls": calls},
        {"role": "tool", "content": "rain", "name": "weather", "tool_call_id": "c1"},
        {"role": "tool", "content": "sun", "name": "weather", "tool_call_id": "c2"},
        {"role": "assistant", "content": "No."},
    ]


def test_a_call_may_come_first() -> None:
    first, *_ = job([CALL, OUTPUT]).messages
    assert (first["role"], first["tool_calls"][0]["id"]) == ("assistant", "c1")


def reasoning(*texts: str, kind: str = "reasoning_text") -> dict[str, Any]:
    field = "content" if kind == "reasoning_text" else "summary"
    parts = [{"type": kind, "text": text} for text in texts]
    return {"type": "reasoning", "id": "rs_1", "summary": [], field: parts}


SAID = {"role": "assistant", "content": "Hm."}


@pytest.mark.parametrize(
    ("items", "thoughts"),
    [
        ([reasoning("So."), SAID], ["So."]),
        ([reasoning("So", "."), SAID], ["So."]),
        ([reasoning("So.", kind="summary_text"), SAID], ["So."]),
        ([{**reasoning("So."), "summary": [{"type": "summary_text", "text": "S"}]}], ["So."]),
        ([{"type": "reasoning", "summary": [], "encrypted_content": "x"}, SAID], [None]),
        ([reasoning("So."), CALL, OUTPUT, reasoning("And."), CALL], ["So.", "And."]),
        ([reasoning("So."), CALL, reasoning("And."), {**CALL, "call_id": "c2"}], ["So.And."]),
        ([reasoning("So.")], ["So."]),
        ([reasoning("So."), {"role": "user", "content": "?"}, SAID], ["So.", None]),
    ],
)
def test_reasoning_belongs_to_the_assistants_turn(items: Any, thoughts: list[str | None]) -> None:
    turns = job([{"role": "user", "content": "hi"}, *items]).messages
    said = [turn for turn in turns if turn["role"] == "assistant"]
    assert [turn.get("reasoning_content") for turn in said] == thoughts


def test_items_of_one_answer_in_a_row_are_one_turn() -> None:
    """A chat has the same turn, whatever the order of the answer's items."""
    other = {"type": "web_search_call", "id": "ws_1"}
    turns = job([reasoning("So."), CALL, other, SAID, OUTPUT]).messages
    assert [turn["role"] for turn in turns] == ["assistant", "tool"]
    assert (turns[0]["content"], turns[0]["reasoning_content"]) == ("Hm.", "So.")
    assert turns[0]["tool_calls"][0]["id"] == "c1"


def test_texts_in_a_row_and_a_thought_behind_one_are_turns_of_their_own() -> None:
    turns = job([SAID, reasoning("So."), SAID, SAID]).messages
    assert [turn["content"] for turn in turns] == ["Hm.", "Hm.", "Hm."]
    assert [turn.get("reasoning_content") for turn in turns] == [None, "So.", None]


@pytest.mark.parametrize(
    ("item", "name", "arguments"),
    [
        ({"type": "custom_tool_call", "name": "patch", "input": "{"}, "patch", {"input": "{"}),
        ({"type": "custom_tool_call", "name": "patch"}, "patch", {"input": ""}),
        ({"type": "local_shell_call", "action": {"command": ["ls"]}}, "local_shell",
         {"command": ["ls"]}),
        ({"type": "local_shell_call"}, "local_shell", {}),
        ({"type": "apply_patch_call", "operation": {"path": "a"}}, "apply_patch", {"path": "a"}),
        ({"type": "function_call", "name": "f", "arguments": '{"a": "b'}, "f", {"a": "b"}),
        ({"type": "function_call", "name": "f", "arguments": {"a": "b"}}, "f", {"a": "b"}),
        ({"type": "function_call", "name": "f", "arguments": [1]}, "f", {"input": [1]}),
        ({"type": "custom_tool_call", "name": "f", "input": {"a": 1}}, "f", {"input": {"a": 1}}),
        ({"type": "local_shell_call", "action": "ls"}, "local_shell", {"input": "ls"}),
    ],
)  # fmt: skip
def test_calls_of_other_kinds_are_calls_with_their_output(
    item: dict[str, Any], name: str, arguments: Any
) -> None:
    for field in ("call_id", "id"):
        output = {"type": f"{item['type']}_output", "call_id": "c1", "output": "done"}
        turns = job([{field: "c1", **item}, output]).messages
        assert turns[0]["tool_calls"][0]["function"] == {"name": name, "arguments": arguments}
        assert turns[1] == {
            "role": "tool", "content": "done", "name": name, "tool_call_id": "c1",
        }  # fmt: skip


@pytest.mark.parametrize("kind", ["web_search_call", "compaction", "ghost_snapshot", "of tomorrow"])
@pytest.mark.parametrize("value", [None, 5, "x", {"type": "x"}, [{"type": "image"}, 5]])
def test_items_of_other_servers_are_skipped_and_named(kind: str, value: Any) -> None:
    fields = ("content", "output", "arguments", "action", "role", "call_id")
    items = [{"role": "user", "content": "hi"}, {"type": kind, **dict.fromkeys(fields, value)}]
    assert job(items).messages == items[:1]
    body = orjson.dumps({"model": "m", "input": items})
    assert read_request(body, ResponsesRequest, strict=False).ignored == (f"input[1].{kind}",)
    with pytest.raises(UnknownParameter):
        read_request(body, ResponsesRequest, strict=True)


def test_arguments_that_were_cut_are_named() -> None:
    body = orjson.dumps({"model": "m", "input": [{**CALL, "arguments": "{"}]})
    assert read_request(body, ResponsesRequest, strict=False).ignored == ("input[0].arguments",)


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([], "input"),
        ([{"type": "reasoning", "summary": []}], "input"),
        ([{"type": "web_search_call", "id": "ws_1"}], "input"),
        ([{"content": "hi"}], "input[0].role"),
        ([{"role": "robot", "content": "hi"}], "input[0].role"),
        ([{"role": "user", "content": 5}], "input[0].content"),
        ([{"role": "user", "content": None}], "input[0].content"),
        ([{"role": "user"}], "input[0].content"),
        ([{"role": "user", "content": [{"type": "input_image"}]}], "input[0].content"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0].text"),
        ([{**CALL, "call_id": None}], "input[0].call_id"),
        ([{**CALL, "name": ""}], "input[0].name"),
        ([CALL, {**OUTPUT, "call_id": None}], "input[1].call_id"),
        ([CALL, {**OUTPUT, "output": [{"type": "input_file"}]}], "input[1].output[0]"),
        ([CALL, {**OUTPUT, "output": [{"type": "text"}]}], "input[1].output[0].text"),
        ("x" * 1300, "input"),
        ([{"type": "reasoning", "content": "x" * 1300}], "input"),
        ([{**CALL, "arguments": orjson.dumps({"a": "x" * 1300}).decode()}], "input"),
    ],
)
def test_an_item_that_cannot_be_read_is_refused_by_its_place(items: Any, param: str) -> None:
    assert refused(items).param == param


def test_a_result_may_name_its_call_by_the_items_id() -> None:
    call = {"type": "local_shell_call", "id": "ls_1", "call_id": "c1", "action": {}}
    output = {"type": "local_shell_call_output", "id": "ls_1", "output": "done"}
    turns = job([call, output]).messages
    assert (turns[1]["tool_call_id"], turns[1]["name"]) == ("c1", "local_shell")


def stored(items: Sequence[AnyItem], used_ids: Sequence[str] = ()) -> list[AnyItem]:
    """Return items as the store keeps them."""
    return [read_item(item.body, item.images) for item in dump_items(items, used_ids)]


def test_texts_of_images_are_kept_beside_an_item() -> None:
    """It reads as before, with the same texts, and its request stays as it was."""
    url, inner = "data:;base64,QUJD" * 20, 'data:;base64,\0\u00e9"' * 20
    parts: list[dict[str, Any]] = [
        {"type": "input_image", "image_url": url, "detail": "low"},
        {"type": "input_text", "text": "\0"},
        {"type": "image_url", "image_url": {"url": inner}},
        {"type": "input_image", "image_url": 5},
        {"type": "input_image"},
    ]
    call = {"type": "function_call_output", "call_id": "c", "output": [*reversed(parts)]}
    other: dict[str, Any] = {
        "type": "else",
        "content": [{"type": ["x"]}, *parts, "x"],
        "output": {"a": url},
    }
    message = {"role": "user", "content": parts}
    body = orjson.dumps({"model": "m", "input": [message, call, other]})
    request = read_request(body, ResponsesRequest, strict=False).request
    dumped = dump_items(request.input, ())
    assert [item.images for item in dumped] == [[url, inner], [inner, url], [url, inner]]
    assert orjson.loads(orjson.dumps(request.model_dump(exclude_unset=True)))["input"][1:] == [
        call,
        other,
    ]
    sent_items: list[dict[str, Any]] = [message, call, other]
    for item, sent in zip(dumped, sent_items, strict=True):
        assert item.images[0].encode() not in item.body or item.id.startswith("item")
        whole = orjson.loads(item.to_json())
        assert sent.items() <= whole.items()
        again = read_item(item.body, item.images)
        assert again.model_dump(exclude_unset=True) == whole
        assert [a is b for a, b in zip(dump_items([again], ())[0].images, item.images, strict=True)]


@pytest.mark.parametrize("used_ids", [(), ("ls_1", "fc_1")])
def test_a_stored_result_still_belongs_to_the_call_whose_id_it_names(
    used_ids: Sequence[str],
) -> None:
    items = [
        {"type": "local_shell_call", "id": "ls_1", "action": {}},
        {"type": "local_shell_call_output", "id": "ls_1", "output": "done"},
        {"type": "function_call", "id": "fc_1", "call_id": "", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "id": "fc_1", "output": "7"},
    ]
    asked = read(items).input
    sent, kept = (to_messages(None, each) for each in (asked, stored(asked, used_ids)))
    assert kept == sent
    assert [turn.name for turn in kept if turn.role == "tool"] == ["local_shell", "f"]


def test_items_of_every_kind_are_stored_without_a_warning_of_their_text() -> None:
    """pydantic's warnings quote callers' texts, and go to the log of the process."""
    other = {"type": "new", "secret": "x"}
    items = [
        {"type": "zzz", "id": "z1", "secret": "x"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "So."}, other]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Hm."}, other]},
        CALL,
        {**OUTPUT, "output": [{"type": "input_text", "text": "rain"}, other]},
        {"role": "user", "content": "And?"},
    ]
    asked = read(items).input
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept = stored(asked)
    assert [item.type for item in kept] == [item.type for item in asked]
    assert to_messages(None, kept) == to_messages(None, asked)


def test_texts_in_a_list_are_parts() -> None:
    thought = {"type": "reasoning", "summary": ["So ", {"type": "summary_text", "text": "it is."}]}
    [turn, asking] = job([thought, {"role": "user", "content": ["And", "?"]}]).messages
    assert (turn["reasoning_content"], asking["content"]) == ("So it is.", "And?")
    assert refused([{"role": "user", "content": [7]}]).param == "input[0].content[0]"


def test_parts_of_other_servers_are_skipped_in_earlier_turns() -> None:
    other = {"type": "new", "text": "x"}
    thought = {"type": "reasoning", "summary": [], "content": [other]}
    said = {"role": "assistant", "content": [other, {"type": "output_text", "text": "Hm."}]}
    turns = job([thought, said, CALL, {**OUTPUT, "output": [other]}]).messages
    assert [turn["content"] for turn in turns] == ["Hm.", ""]
    assert refused([{"role": "user", "content": [other]}]).param == "input[0].content[0]"


def test_a_line_break_counts_as_one_character() -> None:
    assert job([{"role": "user", "content": '"\n' * 450}]).messages[0]["content"] == '"\n' * 450


def test_formats_are_flat() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "null"}}}
    flat = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    asked = job(text={"format": flat, "verbosity": "low"})
    assert asked.grammar == Grammar("json_schema", orjson.dumps(schema).decode(), strict=True)
    assert job(text={"format": {"type": "json_object"}}).grammar is not None
    assert job(text={"format": {"type": "text"}}).grammar is None
    assert job(text={"format": None}).grammar is job().grammar is None
    wrapped = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    for wrong in (wrapped, {"type": "json_schema", "name": "n"}):
        assert refused(text={"format": wrong}).param == "text.format"


def test_tools_are_flat() -> None:
    asked = job(tools=[WEATHER, CLOCK])
    assert asked.tools[0]["function"]["name"] == "weather"
    assert asked.calling is not None
    strict = {each.name: each.strict for each in asked.calling.functions}
    assert (strict, asked.calling.forced) == ({"weather": True, "clock": False}, False)
    assert job(tools=[WEATHER], tool_choice="none").calling is job(tools=[]).calling is None


FLAT_CLOCK = {"type": "function", "name": "clock"}
ALLOWED = {"type": "allowed_tools", "mode": "auto"}


@pytest.mark.parametrize(
    ("choice", "names", "forced"),
    [
        ("required", ["weather", "clock"], True),
        (FLAT_CLOCK, ["clock"], True),
        ({**ALLOWED, "tools": [FLAT_CLOCK]}, ["clock"], False),
    ],
)
def test_a_choice_is_flat(choice: Any, names: list[str], forced: bool) -> None:
    calling = job(tools=[WEATHER, CLOCK], tool_choice=choice, parallel_tool_calls=False).calling
    assert calling is not None
    assert [function.name for function in calling.functions] == names
    assert calling.forced is forced
    assert not calling.parallel


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "custom", "name": "x"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {**ALLOWED, "tools": ["weather"]}}, "tool_choice"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"truncation": "middle"}, "truncation"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ],
)
def test_what_is_not_served_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == param


def test_what_asks_for_nothing_is_accepted() -> None:
    """Agents and SDKs send it unasked."""
    asked = read(
        background=False, store=True, include=["reasoning.encrypted_content"], user="u", tools=[],
        metadata={"a": "b"}, prompt_cache_key="k", safety_identifier="s", max_tool_calls=3,
        truncation="auto", stream_options={"include_obfuscation": False}, service_tier="flex",
        previous_response_id=None, reasoning={"effort": None, "summary": "auto"},
        tool_choice="auto",
    )  # fmt: skip
    assert asked.logprobs is None
    assert read_tier(asked.service_tier) is Tier.FLEX
    assert read_tier(read(service_tier="auto").service_tier) is Tier.DEFAULT


def test_logprobs_are_asked_for_by_either_field() -> None:
    """The SDK sends both, agents sometimes one."""
    assert job(include=["message.output_text.logprobs"]).logprobs == 0
    assert job(top_logprobs=3).logprobs == 3
    assert job().logprobs is None


@pytest.mark.parametrize(
    ("fields", "args"),
    [
        ({}, {}),
        ({"reasoning": {"effort": "none"}}, {"enable_thinking": False}),
        ({"reasoning": {"effort": "minimal"}}, {"enable_thinking": False}),
        ({"reasoning": {"effort": "low"}}, {"enable_thinking": True, "reasoning_effort": "low"}),
        ({"max_output_tokens": 1, "top_logprobs": 2}, {"enable_thinking": False}),
        ({"chat_template_kwargs": {"b": 2}}, {"b": 2}),
    ],
)
def test_effort_steers_thinking(fields: dict[str, Any], args: dict[str, Any]) -> None:
    assert job(**fields).template_args == {"a": 1, **args}


@pytest.mark.parametrize(
    ("fields", "budget"),
    [
        ({}, None),
        ({"reasoning": {"effort": "high"}}, 90),
        ({"reasoning": {"effort": "xhigh"}}, None),
        ({"reasoning": {"effort": "high"}, "thinking_token_budget": 0}, 0),
    ],
)
def test_effort_has_a_budget_where_the_model_has_one(
    fields: dict[str, Any], budget: int | None
) -> None:
    """One of the request's own comes first."""
    request = read(**fields)
    asked = to_job(
        request, caller(), Sampling(), items=request.input, max_tokens=None, template_args={},
        max_chars=99, budgets={"high": 90},
    )  # fmt: skip
    assert asked.thinking_budget == budget


def test_an_answers_length_is_asked_for_or_the_models() -> None:
    assert job().max_tokens == 50
    assert job(max_output_tokens=7).max_tokens == 7


def answer(**fields: Any) -> ResponseWriter:
    asked, made = read(**fields), job(**fields)
    return ResponseWriter(new_response(asked, made, response_id="r", created=5, is_kept=False))


def told(answer: ResponseWriter, *deltas: Delta) -> list[Any]:
    """Give every event of an answer of these deltas."""
    usage = Usage(3, 4, cached_tokens=1, reasoning_tokens=2)
    events = answer.begin(usage)
    for delta in deltas:
        events += answer.add(delta)
    return events + answer.end(usage)


def written(answer: ResponseWriter) -> dict[str, Any]:
    """Return the whole answer, whose items may be any of three."""
    return dict(answer.to_dict())


def kinds(events: list[Any]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def test_a_text_is_told_in_openais_order() -> None:
    """OpenAI's SDK insists on this order; numbers begin at 0."""
    growing = answer()
    events = told(growing, Delta(0, "He", 1), Delta(0, "y", 1), Delta(0, "", 1, "stop"))
    assert kinds(events) == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
        "output_text.delta", "output_text.done", "content_part.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert [event["sequence_number"] for event in events] == list(range(10))
    assert events[2]["item"]["content"] == []
    assert events[2]["item"]["status"] == "in_progress"
    assert events[6]["text"] == "Hey"
    whole = written(growing)
    assert events[-1]["response"] == whole
    assert events[-2]["item"] == whole["output"][0]
    part = {"type": "output_text", "text": "Hey", "annotations": [], "logprobs": []}
    assert whole["output"][0]["content"] == [part]
    assert whole["status"] == "completed"
    assert whole["completed_at"] > whole["created_at"] == 5
    assert whole["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 7,
    }


def test_reasoning_and_calls_are_items_of_their_own() -> None:
    growing = answer(tools=[WEATHER, CLOCK])
    events = told(
        growing,
        Delta(0, reasoning="Hm", tokens=1),
        Delta(0, "Look:", 1),
        Delta(0, call=CallDelta(0, "call_a", "weather")),
        Delta(0, call=CallDelta(0, arguments='{"city":'), tokens=1),
        Delta(0, call=CallDelta(0, arguments='"Ulm"}'), tokens=1),
        Delta(0, call=CallDelta(1, "call_b", "clock", "{}"), tokens=1),
        Delta(0, "", 1, "tool_calls"),
    )
    done = ["content_part.done", "output_item.done"]
    assert kinds(events)[2:] == [
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done",
        *done, "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        *done, "output_item.added", *["function_call_arguments.delta"] * 2,
        "function_call_arguments.done", "output_item.done", "output_item.added",
        "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    reasoning, message, first, second = written(growing)["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm"}]
    assert reasoning["summary"] == []
    assert message["content"][0]["text"] == "Look:"
    called = [(call["call_id"], call["name"], call["arguments"]) for call in (first, second)]
    assert called == [("call_a", "weather", '{"city":"Ulm"}'), ("call_b", "clock", "{}")]
    ends = [event for event in events if event["type"].endswith("arguments.done")]
    assert [(end["name"], end["output_index"]) for end in ends] == [("weather", 2), ("clock", 3)]
    assert len({item["id"] for item in written(growing)["output"]}) == 4


def test_an_answer_cut_by_its_limit_is_incomplete() -> None:
    growing = answer()
    events = told(growing, Delta(0, reasoning="a", tokens=1), Delta(0, "b", 1, "length"))
    assert kinds(events)[-1] == "incomplete"
    whole = written(growing)
    assert whole["status"] == "incomplete"
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert whole["completed_at"] is None
    assert [item["status"] for item in whole["output"]] == ["completed", "incomplete"]


def test_an_answer_of_nothing_is_an_empty_message() -> None:
    """Clients look for one."""
    growing = answer()
    events = told(growing, Delta(0, "", 1, "stop"))
    assert kinds(events)[2] == "output_item.added"
    assert written(growing)["output"][0]["content"][0]["text"] == ""


def test_logprobs_belong_to_the_texts_tokens() -> None:
    growing = answer(top_logprobs=1)
    events = told(
        growing,
        Delta(0, reasoning="x", tokens=1, logprobs=[scored("x")]),
        Delta(0, "", 1, logprobs=[scored("a")]),
        Delta(0, "ab", 1, logprobs=[scored("b")]),
        Delta(0, "", 1, "stop", logprobs=[scored("c")]),
    )
    (part,) = written(growing)["output"][1]["content"]
    assert [token["token"] for token in part["logprobs"]] == ["a", "b", "c"]
    assert part["logprobs"][0] == {
        "token": "a",
        "bytes": [97],
        "logprob": -0.5,
        "top_logprobs": [{"token": "a", "bytes": [97], "logprob": -0.5}],
    }
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [token for delta in deltas for token in delta["logprobs"]] == part["logprobs"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineFailed("m", "no"), "server_error"),
        (Overloaded("full"), "rate_limit_exceeded"),
        (BadRequest("bad"), "invalid_prompt"),
    ],
)
def test_a_failure_is_told_and_ends_the_response(error: Any, code: str) -> None:
    growing = answer()
    growing.begin(Usage(3))
    growing.add(Delta(0, "He", 1))
    event, failed = growing.fail(error)
    assert event["type"] == "error"
    assert (event["message"], event["code"]) == (error.message, error.code)
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": code, "message": error.message}
    assert failed["response"]["output"][0]["status"] == "incomplete"


def test_a_failure_before_the_first_event_brings_the_first_events() -> None:
    """A client learns the id before it learns that nothing comes."""
    events = answer().fail(Overloaded("full"))
    assert kinds(events) == ["created", "in_progress", "error", "failed"]
    assert [event["sequence_number"] for event in events] == [0, 1, 2, 3]


def test_the_answer_repeats_its_request() -> None:
    text = {"format": {"type": "json_schema", "name": "n", "schema": {}}}
    same: dict[str, Any] = {
        "instructions": "Be brief.",
        "tool_choice": "required",
        "metadata": {"a": "b"},
    }
    same |= {"max_output_tokens": 20, "user": "u"}
    asked = answer(**same, tools=[CLOCK], top_logprobs=2, reasoning={"effort": "low"}, text=text)
    whole = written(asked)
    assert same.items() <= whole.items()
    assert (whole["temperature"], whole["top_p"], whole["store"]) == (0.3, 1.0, False)
    assert whole["tools"][0]["strict"] is False
    assert whole["reasoning"] == {"effort": "low", "summary": None}
    assert whole["text"]["format"] == text["format"]


def scored(text: str) -> TokenLogprob:
    likelihood = Likelihood(text, text.encode(), -0.5)
    return TokenLogprob(likelihood, (likelihood,))


SEARCH = {"type": "function", "name": "search", "parameters": None}
SPACES = [
    {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [SEARCH, CLOCK]},
    {"type": "namespace", "name": "wiki", "description": None, "tools": [SEARCH]},
]


def test_functions_in_namespaces_are_functions_of_their_own_name() -> None:
    calling = job(tools=SPACES).calling
    assert calling is not None
    assert [each.name for each in calling.functions] == ["crm__search", "clock", "wiki__search"]


def test_a_call_into_a_namespace_names_it() -> None:
    """The call has the function's own name too: clients route by both."""
    qualified_names = unpack(read(tools=SPACES).tools).qualified_names
    made = new_response(read(), job(), response_id="r", created=5, is_kept=False)
    growing = ResponseWriter(made, qualified_names)
    told(
        growing,
        Delta(0, call=CallDelta(0, "c1", "wiki__search", "{}")),
        Delta(0, call=CallDelta(1, "c2", "clock", "{}"), finish_reason="tool_calls"),
    )
    calls = [(each.get("namespace"), each["name"]) for each in written(growing)["output"]]
    assert calls == [("wiki", "search"), ("crm", "clock")]


def test_an_earlier_call_into_a_namespace_is_shown_as_the_model_knows_it() -> None:
    """Otherwise the model would see a function that it does not have."""
    call = {**CALL, "name": "search", "namespace": "wiki"}
    items = [{"role": "user", "content": "find"}, call, OUTPUT]
    turns = job(items, tools=SPACES).messages
    assert turns[1]["tool_calls"][0]["function"]["name"] == "wiki__search"
    assert turns[2]["name"] == "wiki__search"


@pytest.mark.parametrize(
    "tools",
    [
        [CLOCK, {"type": "web_search"}, {"type": "mcp", "server_label": "x"}],
        [CLOCK, {"type": "namespace", "name": "n", "tools": [{"type": "web_search"}, SEARCH]},
         {"type": "mcp"}],
    ],
)  # fmt: skip
def test_tools_of_other_types_are_skipped_and_named(tools: Any) -> None:
    body = orjson.dumps({"model": "m", "input": "hi", "tools": tools})
    assert read_request(body, ResponsesRequest, strict=False).ignored == (
        "tools.web_search", "tools.mcp",
    )  # fmt: skip
    with pytest.raises(UnknownParameter):
        read_request(body, ResponsesRequest, strict=True)
    calling = job(tools=tools).calling
    assert calling is not None
    assert calling.functions[0].name == "clock"


def test_an_unknown_thing_to_include_is_refused() -> None:
    assert refused(include=["everything"]).param == "include[0]"
