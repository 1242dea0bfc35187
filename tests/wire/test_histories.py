"""Histories that other servers wrote, in two protocols.

Readable parts are read; all else is skipped or refused by name. The same conversation is the same
turns in all three protocols.
"""

from collections.abc import Mapping
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import BadRequest
from gateway.jobs.chat import Sampling
from gateway.wire import anthropic, chat, responses
from gateway.wire.anthropic_blocks import BLOCKS, RESULT_PARTS
from gateway.wire.responses_items import KINDS
from gateway.wire.validation import IMAGE_TYPES, read_request
from tests.docs_tables import READ_AS, SKIPPED
from tests.fakes import caller

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)
OTHERS = {protocol: sorted(types - {*IMAGE_TYPES}) for protocol, types in SKIPPED.items()}
FIELDS = (
    *("content", "text", "thinking", "input", "output", "name", "role", "arguments", "summary"),
    *("action", "operation", "tool_use_id", "call_id", "source", "tool_name", "status"),
)
ID = st.sampled_from(["c1", "c2"])
WORD = st.text("abc", min_size=4, max_size=9)


def other(protocol: str) -> st.SearchStrategy[dict[str, Any]]:
    """Draw an item that another server wrote, with any fields."""
    kinds = st.sampled_from(OTHERS[protocol]) | st.just("of tomorrow")
    return st.builds(
        lambda fields, kind: {**fields, "type": kind},
        st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4),
        kinds,
    )


def whatever(types: tuple[str, ...]) -> st.SearchStrategy[dict[str, Any]]:
    """Draw an item of a known type, with any fields."""
    return st.builds(
        lambda fields, ids, kind: {**fields, **ids, "type": kind},
        st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4),
        st.dictionaries(st.sampled_from(["id", "call_id", "tool_use_id"]), ID),
        st.sampled_from(types),
    )


def texts(*kinds: str) -> st.SearchStrategy[dict[str, Any]]:
    return st.sampled_from(kinds).flatmap(
        lambda kind: WORD.map(lambda text: {"type": kind, READS[kind]: text})
    )


READS = {"text": "text", "thinking": "thinking", "compaction": "content", "tool_result": "content"}
CALL_OF_NONE = {"tool_use_id": "gone"}


def turns(protocol: str, given: Any) -> list[Mapping[str, Any]]:
    """Return the turns of a conversation that the model is shown. Raises BadRequest."""
    common: dict[str, Any] = {"template_args": {}, "max_chars": 10_000}
    who, sampling = caller(), Sampling()
    if protocol == "messages":
        body = orjson.dumps({"model": "m", "max_tokens": 9, "messages": given})
        message = read_request(body, anthropic.MessagesRequest, strict=False).request
        return list(anthropic.to_job(message, who, sampling, **common).messages)
    common["max_tokens"] = 9
    if protocol == "chat":
        body = orjson.dumps({"model": "m", "messages": given})
        asked = read_request(body, chat.ChatRequest, strict=False).request
        return list(chat.to_job(asked, who, sampling, **common).messages)
    body = orjson.dumps({"model": "m", "input": given})
    request = read_request(body, responses.ResponsesRequest, strict=False).request
    return list(responses.to_job(request, who, sampling, items=request.input, **common).messages)


FIELD = {"messages": "messages", "responses": "input"}


def refused(protocol: str, given: Any) -> str:
    """Return the place for which a conversation is refused; that of all of it if it is read."""
    try:
        turns(protocol, given)
    except BadRequest as error:
        return error.param or ""
    return FIELD[protocol]


@pytest.mark.generator(weight=0.3)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["user", "assistant", "system"]),
            st.lists(whatever(BLOCKS) | other("Messages"), max_size=4),
        ),
        max_size=5,
    )
)
def test_any_blocks_are_read_or_refused_by_name(messages: Any) -> None:
    given = [{"role": role, "content": content} for role, content in messages]
    assert refused("messages", given).startswith("messages")


@pytest.mark.generator(weight=0.3)
@given(st.lists(whatever(tuple(set(KINDS) - {"item_reference"})) | other("Responses"), max_size=7))
def test_any_items_are_read_or_refused_by_name(items: Any) -> None:
    assert refused("responses", items).startswith("input")


@pytest.mark.generator(weight=0.3)
@given(
    st.lists(
        st.tuples(
            st.lists(texts("text", "thinking", "compaction") | other("Messages"), max_size=4),
            st.lists(texts("text", "tool_result") | other("Messages"), max_size=4),
        ),
        max_size=4,
    )
)
def test_blocks_of_other_servers_end_no_conversation(pairs: Any) -> None:
    """The texts beside them are read, once each."""
    messages: list[Any] = [{"role": "user", "content": "Hello"}]
    for said, asked in pairs:
        results = [
            {**CALL_OF_NONE, **each} if each["type"] == "tool_result" else each for each in asked
        ]
        messages += [
            {"role": "assistant", "content": said},
            {"role": "user", "content": [*results, {"type": "text", "text": "?"}]},
        ]
    blocks = [block for message in messages[1:] for block in message["content"]]
    known = [block[READS[block["type"]]] for block in blocks if block["type"] in READS]
    read = turns("messages", messages)
    text = "".join(str([turn["content"], turn.get("reasoning_content")]) for turn in read)
    for word in set(known):
        assert text.count(word) >= known.count(word)


@pytest.mark.generator(weight=0.3)
@given(st.lists(WORD.map(lambda text: {"role": "assistant", "content": text}) | other("Responses")))
def test_items_of_other_servers_end_no_conversation(items: Any) -> None:
    read = turns("responses", [{"role": "user", "content": "Hello"}, *items])
    known = "".join(item["content"] for item in items if "type" not in item)
    assert "".join(turn["content"] for turn in read[1:]) == known


@pytest.mark.generator(weight=0.3)
@given(
    st.lists(
        st.tuples(st.text("ab \n", max_size=3), st.text("cd \n", max_size=3), st.lists(WORD)),
        min_size=1,
        max_size=4,
    )
)
def test_a_conversation_is_the_same_turns_in_three_protocols(answers: Any) -> None:
    """Thoughts, text and calls, any of them left out, as the gateway answers them."""
    hello = {"role": "user", "content": "Hello"}
    messages: list[Any] = [hello]
    items: list[Any] = [hello]
    chats: list[Any] = [hello]
    for i, (thoughts, text, words) in enumerate(answers):
        calls = [(f"c{i}.{j}", {"q": word}) for j, word in enumerate(words)]
        items += [{"type": "reasoning", "content": thoughts}] * bool(thoughts)
        items += [{"role": "assistant", "content": text}] * bool(text)
        blocks: list[Any] = [{"type": "thinking", "thinking": thoughts}] * bool(thoughts)
        blocks += [{"type": "text", "text": text}] * bool(text)
        results = []
        told: dict[str, Any] = {"role": "assistant", "content": text, "reasoning_content": thoughts}
        for call_id, arguments in calls:
            json = orjson.dumps(arguments).decode()
            items.append(
                {"type": "function_call", "call_id": call_id, "name": "f", "arguments": json}
            )
            blocks.append({"type": "tool_use", "id": call_id, "name": "f", "input": arguments})
            results.append({"type": "tool_result", "tool_use_id": call_id, "content": "done"})
            function = {"name": "f", "arguments": json}
            call = {"id": call_id, "type": "function", "function": function}
            told.setdefault("tool_calls", []).append(call)
        items += [
            {"type": "function_call_output", "call_id": call_id, "output": "done"}
            for call_id, _ in calls
        ]
        if blocks:
            chats.append(told)
            messages.append({"role": "assistant", "content": blocks})
        chats += [
            {"role": "tool", "tool_call_id": call_id, "name": "f", "content": "done"}
            for call_id, _ in calls
        ]
        again = {"role": "user", "content": "?"}
        messages.append({"role": "user", "content": [*results, {"type": "text", "text": "?"}]})
        items.append(again)
        chats.append(again)
    assert turns("messages", messages) == turns("responses", items) == turns("chat", chats)


def test_the_documented_table_is_of_all_that_is_read() -> None:
    """Each protocol's types once, and none of them is skipped."""
    read = {"Messages": {*BLOCKS, *RESULT_PARTS}, "Responses": {*KINDS}}
    assert {protocol: {*rows} for protocol, rows in READ_AS.items()} == read
    for protocol, types in SKIPPED.items():
        assert not types & read[protocol]
