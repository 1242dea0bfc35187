"""Messages requests → jobs, and deltas → content blocks and events."""

from typing import Any, get_args

import orjson
import pytest

from gateway.errors import (
    BadRequest,
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineFailed,
    Forbidden,
    GatewayError,
    ModelLoading,
    ModelNotFound,
    NoRoom,
    Overloaded,
    PromptTooLarge,
    RateLimited,
    TooLarge,
    Unauthorized,
    UnknownParameter,
)
from gateway.jobs.chat import CallDelta, Delta, GenerateJob, Grammar, Sampling, Usage
from gateway.wire.answers import Answer
from gateway.wire.anthropic import (
    AnthropicErrorType,
    CountMessageTokensRequest,
    MessagesRequest,
    Thoughts,
    error_body,
    error_status,
    to_job,
    usage_dict,
)
from gateway.wire.anthropic_stream import MessageWriter
from gateway.wire.validation import read_request
from tests.fakes import caller

HI = [{"role": "user", "content": "hi"}]
WEATHER = {
    "name": "weather",
    "description": "Tells it.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Ulm"}}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": "rain"}


def read(messages: Any = HI, **fields: Any) -> MessagesRequest:
    body = orjson.dumps({"model": "m", "max_tokens": 9, "messages": messages, **fields})
    return read_request(body, MessagesRequest, strict=False).request


def job(messages: Any = HI, *, own: dict[str, Any] | None = None, **fields: Any) -> GenerateJob:
    asked = read(messages, **fields)
    sampling = Sampling(temperature=0.3)
    return to_job(asked, caller(), sampling, template_args=own or {}, max_chars=1000)


def refused(messages: Any = HI, **fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        job(messages, **fields)
    return caught.value


def ignored(**fields: Any) -> tuple[str, ...]:
    body = orjson.dumps({"model": "m", "max_tokens": 9, "messages": HI, **fields})
    return read_request(body, MessagesRequest, strict=False).ignored


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": each} for each in texts]


def test_a_text_and_its_blocks_are_one_prompt() -> None:
    turns = job([user(*text("one", "two"))], system=text("Be", "brief.")).messages
    assert turns == [
        {"role": "system", "content": "Be\n\nbrief."},
        {"role": "user", "content": "one\n\ntwo"},
    ]
    assert job(system="Be brief.").messages == [{"role": "system", "content": "Be brief."}, *HI]


def test_system_messages_stand_where_they_stood() -> None:
    system = {"role": "system", "content": "now be bold"}
    turns = job([system, *HI, system, *HI], system="Be kind.").messages
    assert [turn["role"] for turn in turns] == ["system", "user", "system", "user"]
    assert turns[0]["content"] == "Be kind.\n\nnow be bold"
    assert turns[2]["content"] == "now be bold"


def test_a_header_in_the_system_prompt_is_not_for_the_model() -> None:
    """It changes from session to session, and would keep prompts from beginning alike."""
    header = "x-anthropic-billing-header: cc_version=1; cc_entrypoint=cli;"
    assert job(system=text(header, "Be brief.")).messages[0]["content"] == "Be brief."
    assert [turn["role"] for turn in job(system=text(header)).messages] == ["user"]


def test_calls_thinking_and_results_become_turns() -> None:
    thought = {"type": "thinking", "thinking": "the weather…", "signature": "s"}
    hidden = {"type": "redacted_thinking", "data": "…"}
    other = {**CALL, "id": "c2", "input": {}}
    results = [RESULT, {**RESULT, "tool_use_id": "c2", "content": text("sun", "wind")}]
    said = assistant(thought, hidden, *text("Let me see."), CALL, other)
    turns = job([*HI, said, user(*results, *text("And?"))]).messages
    assert [turn["role"] for turn in turns] == ["user", "assistant", "tool", "tool", "user"]
    assert (turns[1]["content"], turns[1]["reasoning_content"]) == ("Let me see.", "the weather…")
    assert [call["function"] for call in turns[1]["tool_calls"]] == [
        {"name": "weather", "arguments": {"city": "Ulm"}},
        {"name": "weather", "arguments": {}},
    ]
    assert turns[2] == {"role": "tool", "content": "rain", "tool_call_id": "c1", "name": "weather"}
    assert (turns[3]["content"], turns[4]["content"]) == ("sun\n\nwind", "And?")


def test_a_result_whose_call_is_not_there_has_no_name() -> None:
    """Clients that shorten their history leave out the call."""
    turns = job([user(RESULT, *text("And?"))]).messages
    assert turns == [
        {"role": "tool", "content": "rain", "tool_call_id": "c1"},
        {"role": "user", "content": "And?"},
    ]


def test_thinking_alone_is_a_turn_before_the_answers() -> None:
    """`max_tokens` may have cut such a turn: nothing of it can be continued."""
    thought = {"type": "thinking", "thinking": "Well", "signature": ""}
    begun = job([*HI, assistant(thought, *text(""))])
    assert begun.messages[1] == {"role": "assistant", "content": "", "reasoning_content": "Well"}
    assert not begun.continues


@pytest.mark.parametrize("thought", [{}, {"thinking": None}, {"thinking": ""}])
def test_a_block_of_thinking_without_a_thought_is_left_out(thought: dict[str, Any]) -> None:
    messages = [*HI, assistant({"type": "thinking", **thought}, *text("Well.")), *HI]
    assert job(messages).messages[1] == {"role": "assistant", "content": "Well."}


def test_the_tools_that_a_search_found_are_read_by_name() -> None:
    named = {**text("Found:")[0], "tool_name": "other"}  # no reference
    found = [named, {"type": "tool_reference", "tool_name": "fs__read"}, {"type": "new"}]
    found += [{"type": "tool_reference"}]
    messages = [*HI, assistant(CALL), user({**RESULT, "content": found})]
    assert job(messages).messages[-1]["content"] == "Found:\n\nfs__read"
    assert ignored(messages=messages) == ("messages[2].content[0].content[2].new",)


def test_a_summary_is_read_in_the_users_turn_before() -> None:
    summary = {"type": "compaction", "content": "So far."}
    turns = job([*HI, assistant(summary, *text("Yes.")), *HI]).messages
    said = [(turn["role"], turn["content"]) for turn in turns]
    assert said == [("user", "hi\n\nSo far."), ("assistant", "Yes."), ("user", "hi")]
    assert not job([*HI, assistant(summary)]).continues
    assert job([*HI, assistant({"type": "compaction"}), *HI]).messages == [
        {"role": "user", "content": "hi\n\nhi"}
    ]


@pytest.mark.parametrize("kind", ["server_tool_use", "web_search_tool_result", "of tomorrow"])
@pytest.mark.parametrize("content", [None, 5, "x", {"type": "error"}, [{"type": "image"}, 5]])
def test_blocks_of_other_servers_are_skipped_and_named(kind: str, content: Any) -> None:
    other = {"type": kind, "content": content, "id": 5, "name": {}, "role": "user"}
    messages = [user(other, *text("hi")), assistant(other, *text("ho")), user(*text("so"))]
    said = [(turn["role"], turn["content"]) for turn in job(messages).messages]
    assert said == [("user", "hi"), ("assistant", "ho"), ("user", "so")]
    assert ignored(messages=messages) == (
        f"messages[0].content[0].{kind}", f"messages[1].content[0].{kind}",
    )  # fmt: skip
    body = orjson.dumps({"model": "m", "max_tokens": 9, "messages": messages})
    with pytest.raises(UnknownParameter):
        read_request(body, MessagesRequest, strict=True)


@pytest.mark.parametrize(
    ("given", "read"), [([], {}), ("", {}), ('{"a":1', {"a": 1}), ([1], {"input": [1]})]
)
def test_an_input_that_is_no_object_is_read_as_one_and_named(given: Any, read: Any) -> None:
    messages = [*HI, assistant({**CALL, "input": given}), user(RESULT)]
    assert job(messages).messages[1]["tool_calls"][0]["function"]["arguments"] == read
    assert ignored(messages=messages) == ("messages[1].content[0].input",)


def test_a_result_that_is_an_error_is_shown_and_words_before_it_stay_before() -> None:
    """A model reads why a call failed; the user's earlier words stay first."""
    error = {**RESULT, "is_error": True}
    turns = job([*HI, assistant(CALL), user(*text("See:"), error)]).messages
    said = [(turn["role"], turn["content"]) for turn in turns[2:]]
    assert said == [("user", "See:"), ("tool", "rain")]


def test_messages_of_one_role_in_a_row_are_one_turn() -> None:
    """Anthropic joins them so: many templates refuse anything else."""
    said = {"role": "assistant", "content": "so"}
    turns = job([*HI, *HI, said, said, *HI]).messages
    assert [(turn["role"], turn["content"]) for turn in turns] == [
        ("user", "hi\n\nhi"), ("assistant", "soso"), ("user", "hi"),
    ]  # fmt: skip


def test_the_last_assistant_message_is_continued() -> None:
    begun = [*HI, {"role": "assistant", "content": "The answer is"}]
    assert job(begun).continues
    assert job([*begun, user()]).continues
    assert not job().continues


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([user({"type": "image", "source": {}})], "messages[0].content[0]"),
        ([user(*text("see"), {"type": "document", "source": {}})], "messages[0].content[1]"),
        ([user({"type": "of tomorrow"})], "messages"),
        ([user(CALL)], "messages[0].content[0]"),
        ([*HI, assistant(RESULT)], "messages[1].content[0]"),
        ([*HI, {"role": "system", "content": [CALL]}], "messages[1].content[0]"),
        ([user({"type": "tool_result"})], "messages[0].content[0].tool_use_id"),
        ([user({"type": "text"})], "messages[0].content[0].text"),
        ([*HI, assistant({"type": "tool_use", "id": "c"}), *HI], "messages[1].content[0].name"),
        ([*HI, assistant(CALL)], "messages[1]"),
        ([*HI, assistant(CALL), {"role": "assistant", "content": "So"}], "messages[2]"),
        ([*HI, {"role": "assistant", "content": ""}], "messages[1]"),
        ([{"role": "developer", "content": "x"}], "messages[0].role"),
        ([*HI, assistant(CALL), user({**RESULT, "content": [{"type": "image"}]})],
         "messages[2].content[0].content[0]"),
        ([], "messages"),
        ([user()], "messages"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_where_it_stands(messages: Any, param: str) -> None:
    error = refused(messages)
    assert error.param == param
    if "image" in str(messages):
        assert "'image'" in error.message


CLOCK = {"type": "custom", "name": "c" * 128, "input_schema": {"type": "object"}}
ONE_AT_ONCE = {"type": "auto", "disable_parallel_tool_use": True}


@pytest.mark.parametrize(
    ("choice", "count", "forced", "parallel"),
    [
        (None, 2, False, True),
        (ONE_AT_ONCE, 2, False, False),
        ({"type": "any"}, 2, True, True),
        ({"type": "tool", "name": "weather"}, 1, True, False),
    ],
)
def test_a_choice_of_tools_is_kept(choice: Any, count: int, forced: bool, parallel: bool) -> None:
    asked = job(tools=[WEATHER, CLOCK], tool_choice=choice)
    assert asked.tools[0]["function"]["parameters"] == WEATHER["input_schema"]
    assert asked.calling is not None
    assert asked.calling.functions[0].name == "weather"
    assert len(asked.calling.functions) == count
    assert (asked.calling.forced, asked.calling.parallel) == (forced, parallel)


def test_tools_that_may_not_be_called_are_not_shown() -> None:
    none = job(tools=[WEATHER], tool_choice={"type": "none"})
    assert (none.calling, none.tools) == (None, ())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tools"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tools": [{**WEATHER, "name": "two words"}]}, "tools[0].name"),
        ({"tools": [{**WEATHER, "description": "x" * 1500}]}, "tools"),
        ({"messages": [user(*text("x" * 1500))]}, "messages"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"system": [{"type": "text"}]}, "system[0].text"),
    ],
)
def test_a_tool_or_a_text_that_cannot_be_used_is_refused_by_its_place(
    fields: dict[str, Any], param: str
) -> None:
    assert refused(**fields).param == param


@pytest.mark.parametrize(
    ("schema", "problem"),
    [({}, "Field required"), ({"type": ["object", "null"]}, "Input should be 'object'")],
)
def test_a_tools_schema_is_of_an_object(schema: Any, problem: str) -> None:
    """Another schema is refused in Anthropic's words, which name the first such tool."""
    fault = refused(tools=[WEATHER, {"name": "x", "input_schema": schema}])
    assert fault.message == f"tools.1.input_schema.type: {problem}"
    assert fault.param == "tools[1].input_schema"


def test_anthropics_own_tools_are_skipped_and_named() -> None:
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    assert ignored(tools=[search, WEATHER]) == ("tools.web_search_20250305",)
    assert len(job(tools=[search, WEATHER]).tools) == 1
    assert "web_search_20250305" in refused(tools=[search]).message


def test_limits_and_sampling_are_the_requests_own() -> None:
    asked = job(temperature=1, top_p=0.5, top_k=3, stop_sequences=["x", ""], max_tokens=7)
    sampling = asked.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1, 0.5, 3)
    assert (asked.max_tokens, list(asked.stop)) == (7, ["x"])
    assert job().sampling.temperature == 0.3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0), ("max_tokens", None), ("max_tokens", "9"), ("temperature", 1.1),
        ("temperature", -1), ("top_p", 2), ("top_k", -1), ("stop_sequences", "x"),
        ("stop_sequences", ["x"] * 65), ("stop_sequences", ["x" * 257]), ("stream", 1),
        ("model", ""), ("messages", {}), ("system", 3), ("tools", {}), ("tool_choice", "auto"),
        ("thinking", "enabled"), ("thinking", {"type": "hard"}), ("output_config", []),
        ("thinking", {"type": "enabled", "budget_tokens": 1023}),
        ("thinking", {"type": "enabled", "budget_tokens": 1024.5}),
        ("thinking", {"type": "enabled", "budget_tokens": 2000}),  # max_tokens is less
        ("output_config", {"effort": "utmost"}), ("output_config", {"format": {"type": "xml"}}),
        ("mcp_servers", [{"type": "url", "url": "http://x"}]),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_by_its_name(field: str, value: Any) -> None:
    param = refused(**{field: value}).param
    assert param is not None
    assert param.split("[")[0].split(".")[0] == field


def test_what_changes_no_answer_is_taken_and_the_rest_is_named() -> None:
    """Hints of caching and billing are of no effect here; edits of the context would be."""
    cached = {"cache_control": {"type": "ephemeral"}}
    assert ignored(
        metadata={"user_id": "u"}, service_tier="auto", system=[{**text("x")[0], **cached}],
        tools=[{**WEATHER, **cached, "eager_input_streaming": True}], mcp_servers=[], **cached,
        messages=[user({**text("x")[0], **cached})],
    ) == ()  # fmt: skip
    assert ignored(
        context_management={"edits": []}, container="c", betas=["b"],
        thinking={"type": "adaptive", "budget_tokens": 2000},
        tools=[{**WEATHER, "defer_loading": True}],
    ) == (
        "betas", "container", "context_management", "tools[0].defer_loading",
        "thinking.budget_tokens",
    )  # fmt: skip
    body = orjson.dumps({"model": "m", "max_tokens": 9, "messages": HI, "container": "c"})
    with pytest.raises(UnknownParameter):
        read_request(body, MessagesRequest, strict=True)


@pytest.mark.parametrize(
    ("own", "fields", "given", "thoughts"),
    [
        ({}, {}, {"enable_thinking": False}, "none"),
        ({"enable_thinking": True}, {}, {"enable_thinking": True}, "none"),
        ({"a": 1}, {"thinking": {"type": "adaptive"}}, {"enable_thinking": True, "a": 1}, "whole"),
        ({"enable_thinking": False},
         {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1025},
         {"enable_thinking": True}, "whole"),
        ({"enable_thinking": True}, {"thinking": {"type": "disabled"}},
         {"enable_thinking": False}, "none"),
        ({}, {"thinking": {"type": "adaptive", "display": "omitted"},
              "output_config": {"effort": "low"}},
         {"enable_thinking": True, "reasoning_effort": "low"}, "signed"),
        ({}, {"output_config": {"effort": "max"}}, {"enable_thinking": False}, "none"),
    ],
)  # fmt: skip
def test_thinking_is_the_requests_then_the_models(
    own: dict[str, Any], fields: dict[str, Any], given: dict[str, Any], thoughts: str
) -> None:
    """Thoughts are shown only to requests that asked for thinking."""
    assert dict(job(own=own, **fields).template_args) == given
    assert read(**fields).thoughts == thoughts


def test_thinking_has_a_budget_by_itself_or_by_effort() -> None:
    """The one that the request names comes first."""
    own = {"low": 5, "default": 9}
    enabled = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1025}
    low = {"output_config": {"effort": "low"}}
    request = read(**enabled, **low)
    budgets = [
        to_job(each, caller(), Sampling(), template_args={}, max_chars=99, budgets=own)
        for each in (request, read(**low), read())
    ]
    assert [each.thinking_budget for each in budgets] == [1024, 5, 9]
    assert request.param_of("thinking_budget") == "thinking.budget_tokens"
    assert job(thinking={"type": "adaptive", "budget_tokens": 1024}).thinking_budget is None


def test_a_form_is_held_by_a_grammar() -> None:
    schema = {"type": "object", "properties": {"title": {"type": "string"}}}
    form = {"type": "json_schema", "schema": schema}
    grammar = Grammar("json_schema", orjson.dumps(schema).decode(), must_fit=True)
    assert job(output_config={"format": form}).grammar == grammar
    assert job(output_format=form).grammar == grammar
    assert job(output_format=form, output_config={"format": form}).grammar == grammar
    other = {**form, "schema": {"type": "array"}}
    asked = {"output_format": other, "output_config": {"format": form}}
    assert refused(**asked).param == "output_format"
    assert read(output_config={"format": form}).param_of("answer_form") == "output_config.format"
    assert read(tools=[WEATHER]).param_of("answer_form") == "tools"
    prefill = [*HI, {"role": "assistant", "content": "{"}]
    assert refused(prefill, output_format=form).param == "output_format"
    assert refused(prefill, tools=[WEATHER], tool_choice={"type": "any"}).param == "tool_choice"


def test_counting_needs_no_limit() -> None:
    body = orjson.dumps({"model": "m", "messages": HI, "tools": [WEATHER]})
    request = read_request(body, CountMessageTokensRequest, strict=False).request
    asked = to_job(request, caller(), Sampling(), template_args={}, max_chars=1000)
    assert asked.max_tokens is None
    assert len(asked.tools) == 1


USAGE = Usage(100, 20, cached_tokens=64, reasoning_tokens=5, kept_tokens=32)


def written(
    *deltas: Delta, thoughts: Thoughts = "whole", max_tokens: int = 9
) -> tuple[dict[str, Any], list[Any]]:
    """Return the message, and all events; both must add up to the same."""
    writer = MessageWriter("m", max_tokens=max_tokens, thoughts=thoughts, request_id="r")
    events: list[Any] = [*writer.begin(USAGE)]
    for delta in deltas:
        events += writer.add(delta)
    events += writer.end(USAGE)
    unstreamed = MessageWriter("m", max_tokens=max_tokens, thoughts=thoughts, request_id="r")
    whole: Any = unstreamed.whole(Answer([deltas], USAGE))
    assert _added_up(events) == {**whole, "id": events[0]["message"]["id"]}
    return whole, events


def _added_up(events: list[Any]) -> dict[str, Any]:
    message: dict[str, Any] = {**events[0]["message"], "content": []}
    inputs: dict[int, str] = {}
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append({**event["content_block"]})
            case "content_block_delta":
                block = message["content"][event["index"]]
                match event["delta"]:
                    case {"type": "input_json_delta", "partial_json": piece}:
                        inputs[event["index"]] = inputs.get(event["index"], "") + piece
                    case {"type": "signature_delta", "signature": signature}:
                        block["signature"] = signature
                    case {"type": "text_delta", "text": piece}:
                        block["text"] += piece
                    case {"type": "thinking_delta", "thinking": piece}:
                        block["thinking"] += piece
            case "message_delta":
                message |= event["delta"]
                message["usage"] = event["usage"]
    for index, json in inputs.items():
        message["content"][index]["input"] = orjson.loads(json)
    return message


def test_an_answer_is_its_blocks_in_order() -> None:
    whole, events = written(
        Delta(0, reasoning="hm", tokens=1),
        Delta(0, reasoning="m", tokens=1),
        Delta(0, "so", 1),
        Delta(0, call=CallDelta(0, "c1", "weather", ""), tokens=1),
        Delta(0, call=CallDelta(0, arguments='{"city":'), tokens=1),
        Delta(0, call=CallDelta(0, arguments='"Ulm"}'), tokens=1),
        Delta(0, call=CallDelta(1, "c2", "clock", "{}"), tokens=1),
        Delta(0, tokens=1, finish_reason="tool_calls"),
    )
    thinking, said, first, second = whole["content"]
    assert thinking["thinking"] == "hmm"
    assert len(thinking["signature"]) == 44
    assert said == {"type": "text", "text": "so"}
    assert first == {**CALL, "caller": {"type": "direct"}}
    assert second["input"] == {}
    assert whole["stop_reason"] == "tool_use"
    kinds = [event["type"] for event in events]
    assert kinds[:4] == ["message_start", "content_block_start", "ping", "content_block_delta"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4
    assert kinds.count("ping") == 1


def test_thinking_that_is_not_to_be_shown_is_signed_only() -> None:
    deltas = (Delta(0, reasoning="hm", tokens=1), Delta(0, "so", 1, "stop"))
    signed, _ = written(*deltas, thoughts="signed")
    shown, _ = written(*deltas)
    assert signed["content"][0]["thinking"] == ""
    assert signed["content"][0]["signature"] == shown["content"][0]["signature"]
    none, _ = written(*deltas, thoughts="none")
    assert [block["type"] for block in none["content"]] == ["text"]
    assert none["usage"]["output_tokens_details"] == {"thinking_tokens": 5}


@pytest.mark.parametrize(
    ("last", "reason", "sequence"),
    [
        (Delta(0, "x", 1, "stop"), "end_turn", None),
        (Delta(0, "x", 1, "stop", stop="END"), "stop_sequence", "END"),
        (Delta(0, "x", 9, "length"), "max_tokens", None),
        (Delta(0, "x", 8, "length"), "model_context_window_exceeded", None),
        (Delta(0, "x", 1, "tool_calls", stop="END"), "tool_use", None),
    ],
)
def test_the_reason_of_the_end_is_anthropics(
    last: Delta, reason: str, sequence: str | None
) -> None:
    """An answer that the context cut has less than it was allowed."""
    whole, _ = written(last)
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)


def test_an_answer_of_nothing_has_no_blocks() -> None:
    whole, events = written(Delta(0, tokens=1, finish_reason="stop"))
    assert whole["content"] == []
    kinds = [event["type"] for event in events]
    assert kinds == ["message_start", "message_delta", "message_stop"]


def test_a_call_that_was_cut_has_no_input() -> None:
    writer = MessageWriter("m", max_tokens=1, thoughts="none", request_id="r")
    call = CallDelta(0, "c1", "weather", '{"city": "U')
    deltas = [Delta(0, call=call, tokens=1), Delta(0, finish_reason="length")]
    (block,) = writer.whole(Answer([deltas], USAGE))["content"]
    assert block == {**CALL, "caller": {"type": "direct"}, "input": {}}


def test_the_prompts_tokens_are_counted_once() -> None:
    """Read from the cache, newly kept in it, and neither: together they are the prompt."""
    usage = usage_dict(USAGE)
    names = ("cache_read_input_tokens", "cache_creation_input_tokens", "input_tokens")
    assert [usage[name] for name in names] == [64, 32, 4]  # type: ignore[literal-required]
    twice = usage_dict(Usage(100, 1, cached_tokens=64, kept_tokens=96))
    assert (twice["input_tokens"], twice["cache_creation_input_tokens"]) == (0, 36)


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (BadRequest("no"), 400, "invalid_request_error", None),
        (Unauthorized("no"), 401, "authentication_error", "invalid_api_key"),
        (Forbidden("no"), 403, "permission_error", "forbidden"),
        (ModelNotFound("x"), 404, "not_found_error", "model_not_found"),
        (TooLarge("no"), 413, "request_too_large", "request_too_large"),
        (RateLimited("no"), 429, "rate_limit_error", "rate_limit_exceeded"),
        (EngineFailed("m", "x"), 500, "api_error", "engine_failed"),
        (GatewayError("no"), 500, "api_error", None),
        (ModelLoading("no"), 503, "api_error", "model_loading"),
        (DeadlineExceeded(1), 504, "timeout_error", "deadline_exceeded"),
        (PromptTooLarge("m", 9, 8), 507, "api_error", "insufficient_memory"),
        (Overloaded("no"), 529, "overloaded_error", "rate_limit_exceeded"),
        (NoRoom("m", ["n"]), 529, "overloaded_error", "no_room"),
    ],
)
def test_errors_have_anthropics_envelope(
    error: GatewayError, status: int, kind: str, code: str | None
) -> None:
    body: Any = error_body(error, "req-1")
    assert (body["type"], body["request_id"]) == ("error", "req-1")
    assert (body["error"]["message"], body["error"]["type"]) == (error.message, kind)
    assert error_status(error) == error_status(type(error)) == status
    assert kind in get_args(AnthropicErrorType)
    assert body["error"].get("details") == (None if code is None else {"error_code": code})


def test_a_conversation_that_the_server_should_keep_is_refused_as_anthropic_would() -> None:
    """The SDKs' tool runners ask for it first, and go on with whole conversations."""
    body = error_body(refused(thread={"type": "create"}), "r")
    assert body["error"]["details"] == {"error_code": "thread_unsupported_request"}


def test_a_prompt_that_is_too_long_says_so_in_anthropics_words() -> None:
    """Agents know by these words that they have to shorten it."""
    body = error_body(ContextLengthExceeded(200, 209), "req-1")
    assert body["error"]["message"] == "prompt is too long: 209 tokens > 200 maximum"
    assert error_status(ContextLengthExceeded) == 400


PAPER = {
    "type": "document",
    "title": "Paper",
    "context": "From 2026.",
    "source": {"type": "text", "media_type": "text/plain", "data": "Cats purr."},
    "citations": {"enabled": True},
}
PIECES = {"type": "document", "source": {"type": "content", "content": text("One.", "Two.")}}
FOUND = {
    "type": "search_result",
    "source": "https://cats.example",
    "title": "Cats",
    "content": text("They purr."),
}


@pytest.mark.parametrize(
    ("block", "read"),
    [
        (PAPER, "Paper\nFrom 2026.\nCats purr."),
        (PIECES, "One.\n\nTwo."),
        ({"type": "document", "source": {"type": "content", "content": "One."}}, "One."),
        (FOUND, "Cats\nhttps://cats.example\nThey purr."),
    ],
)
def test_documents_of_text_and_what_a_search_found_are_text(block: Any, read: str) -> None:
    assert job([user(block, *text("Why?"))]).messages[-1]["content"] == f"{read}\n\nWhy?"
    result = {**RESULT, "content": [block]}
    assert job([*HI, assistant(CALL), user(result)]).messages[-1]["content"] == read


@pytest.mark.parametrize(
    ("block", "param"),
    [
        ({**PAPER, "source": {"type": "base64", "media_type": "application/pdf", "data": "x"}}, ""),
        ({**PAPER, "source": {"type": "url", "url": "http://x"}}, ""),
        ({**PAPER, "source": "text"}, ""),
        ({"type": "document"}, ""),
        ({**PAPER, "source": {"type": "text"}}, ".source.data"),
        ({**PAPER, "source": {"type": "content"}}, ".source.content"),
        ({**PIECES, "source": {"type": "content", "content": [{"type": "image"}]}},
         ".source.content[0]"),
        ({**FOUND, "content": None}, ".content"),
        ({**FOUND, "content": [{"type": "image"}]}, ".content[0]"),
    ],
)  # fmt: skip
def test_other_documents_are_refused_where_they_stand(block: Any, param: str) -> None:
    """PDFs, addresses, and documents that lack their text; nobody looks at an address."""
    assert refused([user(block)]).param == f"messages[0].content[0]{param}"
