"""The parts of a request that a router reads."""

from typing import Any

import orjson
import pytest

from deploy.ray.calls import BLOCK_BYTES, MOST_BLOCKS, digests, read_call
from deploy.ray.choice import Call
from gateway.ids import OWN_NAME, new_id

SALT = b"of this cluster"
SYSTEM = {"role": "system", "content": "Answer briefly. " * 64}


def read(body: Any, path: str = "/chat/completions") -> Call:
    raw = body if isinstance(body, bytes) else orjson.dumps(body)
    return read_call(path, raw, SALT, {"m": "m", "alias": "m"}.get)


def chat(*texts: str) -> dict[str, Any]:
    messages = [SYSTEM, *({"role": "user", "content": text} for text in texts)]
    return {"model": "m", "messages": messages, "temperature": 0}


def test_conversations_share_the_blocks_that_both_begin_with() -> None:
    one, other = read(chat("one" * 200)).blocks, read(chat("other" * 200)).blocks
    shared = [a == b for a, b in zip(one, other, strict=False)]
    assert shared.index(False) == sum(shared)  # none is equal after the first that differs
    assert sum(shared) == len(orjson.dumps(SYSTEM)) // BLOCK_BYTES


def test_the_next_turn_begins_with_all_blocks_of_the_last() -> None:
    first = chat("hello" * 100)
    answer = {"role": "assistant", "content": "hi"}
    later = {**first, "messages": [*first["messages"], answer, SYSTEM]}
    blocks = read(first).blocks
    assert read(later).blocks[: len(blocks)] == blocks
    assert len(read(later).blocks) > len(blocks)


def test_aliases_and_sampling_do_not_matter_and_models_do() -> None:
    body = chat("hello")
    assert read({**body, "model": "alias", "seed": 7}).blocks == read(body).blocks
    assert not set(digests(body, b"m", SALT)) & set(digests(body, b"n", SALT))


def test_two_keys_have_no_digest_in_common() -> None:
    """A router would send one to where the other's prompt is, of which it may use nothing."""
    raw, find = orjson.dumps(chat("hello")), {"m": "m"}.get
    one, other = (read_call("/chat/completions", raw, SALT, find, key) for key in ("1", "2"))
    assert one.blocks
    assert not set(one.blocks) & set(other.blocks)


def test_digests_need_the_salt_and_say_nothing_of_the_text() -> None:
    body = chat("a secret" * 99)
    ours, theirs = digests(body, b"m", SALT), digests(body, b"m", b"another's")
    assert not set(ours) & set(theirs)
    assert {len(each) for each in ours} == {8}
    assert not any(b"secret" in each for each in ours)


def test_a_huge_conversation_has_no_more_blocks_than_are_compared() -> None:
    assert len(read(chat("x" * 10 * MOST_BLOCKS * BLOCK_BYTES)).blocks) == MOST_BLOCKS


@pytest.mark.parametrize(
    "body",
    [
        {"model": "m", "prompt": "once upon " * 99},
        {"model": "m", "input": "once upon " * 99, "instructions": "a tale"},
        {"model": "m", "input": [{"role": "user", "content": "once upon " * 99}]},
        {"model": "m", "system": [{"type": "text", "text": "once upon " * 99}], "messages": []},
    ],
)
def test_prompts_and_inputs_have_beginnings_too(body: dict[str, Any]) -> None:
    assert read(body).blocks


@pytest.mark.parametrize(
    "body", [b"", b"no json", b"[1]", b"{}", b'{"model": 7}', b'{"model": "unknown"}', b"\xff"]
)
def test_an_unreadable_call_may_go_to_any_replica(body: bytes) -> None:
    call = read(body)
    assert (call.model, tuple(call.blocks), call.owner) == (None, (), None)


@pytest.mark.parametrize(
    ("odd", "is_own"),
    [
        ({"previous_response_id": new_id("resp", 24), "input": "on"}, True),
        ({"input": [{"type": "item_reference", "id": new_id("msg", 16)}]}, True),
        ({"previous_response_id": 3}, False),
        ({"previous_response_id": "resp_short"}, False),
        ({"input": [{"type": "item_reference", "id": None}, "text", None]}, False),
        ({"input": {"type": "item_reference"}}, False),
    ],
)
def test_an_id_names_the_replica_that_keeps_it_and_an_odd_one_none(
    odd: dict[str, Any], is_own: bool
) -> None:
    assert read({"model": "m", **odd}, "/responses").owner == (OWN_NAME if is_own else None)


def test_paths_name_who_keeps_the_response() -> None:
    for rest in ("", "/input_items", "/cancel"):
        assert read(b"", f"/responses/{new_id('resp', 24)}{rest}").owner == OWN_NAME
    assert read(b"", "/responses/input_tokens").owner is None


@pytest.mark.parametrize(
    "field", [b"[" * 300 + b"]" * 300, b"[" + b"[]," * 1_000_000 + b"[]]"], ids=["deep", "many"]
)
def test_a_body_beyond_the_bounds_asks_for_nothing(field: bytes) -> None:
    """The ingress reads it as the gateway does, which refuses it."""
    assert read(b'{"model": "m", "messages": %s}' % field) == read(b"[]")
