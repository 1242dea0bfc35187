"""Requests whose every field can be made as large as wanted, and the cost of reading them."""

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import orjson

from gateway.api.endpoints import ENDPOINTS
from gateway.errors import GatewayError
from gateway.jobs import Caller
from gateway.jobs.chat import Sampling
from gateway.registry import Catalog
from gateway.wire import (
    anthropic,
    chat,
    completions,
    decisions,
    embeddings,
    rerank,
    responses,
    responses_items,
)
from gateway.wire.bounds import Bounds
from gateway.wire.validation import CharBounds, read_request
from tests.fuzz.asking import POSTS
from tests.fuzz.harness import FIELDS

# What counts may be set to: a bound that the settings can lift must not hide a slow walk.
BOUNDS = Bounds(max_messages=1_000_000)
CHARS = 10**9
TIMES, MOST = 4, 8.0  # how much larger, and how much longer that may take: a square takes 16 times
# The same of what seems slow. One that grows as it should takes up to 40 times as long, most of it
# for memory that the process has not at hand yet; a square takes 256 times.
SURE_TIMES, SURE_MOST, LARGE = 16, 100.0, 6_400_000
NOTHING_S = 0.004  # too short to keep anybody waiting, or to measure
RUNS = 3
ROUNDS, SURE_ROUNDS = 2, 4

Grow = Callable[[int], Any]  # about so many bytes of JSON


def repeated(item: Any) -> Grow:
    """Grow by the number of items."""
    size = len(orjson.dumps(item)) + 1
    return lambda nbytes: [item] * max(1, nbytes // size)


ANY: dict[str, Grow] = {
    "a text": lambda n: "x" * n,
    "a text of escapes": lambda n: "\x00" * (n // 6),
    "a text of brackets": lambda n: "[{" * (n // 2),
    "a text of blank lines": lambda n: "\n\n" * (n // 4),
    "texts": repeated("x"),
    "numbers": repeated(1),
    "decimals": repeated(0.5),
    "lists": repeated([]),
    "objects": repeated({}),
    "nulls": repeated(None),
    "named": lambda n: {f"k{i}": i for i in range(n // 14)},
    "numbered": lambda n: {str(i): 1 for i in range(n // 10)},
    "one name": lambda n: {"x" * n: 1},
}


def within(grow: Grow, wrap: Callable[[Any], Any]) -> Grow:
    """Grow something inside of something else."""
    return lambda n: wrap(grow(n))


def turn(role: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": "x" * 200, **more}


def call(arguments: str = "{}", **more: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments, **more}
    return {"id": "c", "type": "function", "function": function}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def used(name: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": name, "name": "f", "input": {}}


def result(name: str) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": name, "content": "x"}


def function(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def item(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "call_id": "c", "name": "f", "arguments": "{}", **more}


def form(schema: Grow) -> Grow:
    """Grow a schema that an answer is held to."""
    return lambda n: {"type": "json_schema", "json_schema": {"name": "s", "schema": schema(n)}}


SCHEMAS: dict[str, Grow] = {
    "properties": lambda n: {"properties": {f"p{i}": {"type": "null"} for i in range(n // 25)}},
    "references": lambda n: {
        "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(n // 35)}
    },
    "branches": lambda n: {"anyOf": [{"const": i} for i in range(n // 18)]},
    "values": lambda n: {"enum": list(range(n // 7))},
    "a description": lambda n: {"description": "x" * n},
}
MESSAGES: dict[str, Grow] = {
    **{
        f"{role} turns": repeated(turn(role))
        for role in ("developer", "system", "user", "assistant", "tool", "function")
    },
    "short turns": repeated({"role": "user", "content": ""}),
    "turns in turn": lambda n: [turn("user"), turn("assistant")] * (n // 500),
    "parts": lambda n: [turn("user", content=repeated({"type": "text", "text": "x"})(n))],
    "wrong parts": lambda n: [turn("user", content=repeated(1)(n))],
    "calls": lambda n: [turn("assistant", tool_calls=repeated(call())(n))],
    "wrong calls": lambda n: [turn("assistant", tool_calls=repeated({})(n))],
    "turns with calls": repeated(turn("assistant", tool_calls=[call()])),
    "arguments": lambda n: [turn("assistant", tool_calls=[call(f'{{"a":"{"x" * n}"}}')])],
    "wrong arguments": lambda n: [turn("assistant", tool_calls=[call("{" * n)])],
    "a name": lambda n: [turn("user", name="x" * n)],
    "a call's name": lambda n: [turn("assistant", tool_calls=[call(name="x" * n)])],
    "what nobody knows": lambda n: [turn("user", **{f"k{i}": i for i in range(n // 14)})],
}
TEXT = {"type": "text", "text": "x"}
BLOCKS: dict[str, Grow] = {
    "results": lambda n: [assistant(used("c")), user(*repeated(result("c"))(n))],
    "results of no call": lambda n: [user(*repeated(result("d"))(n))],
    "calls in blocks": lambda n: [
        assistant(*(used(f"c{i}") for i in range(n // 60))), user(result("c0")),
    ],
    "turns of blocks": lambda n: [assistant(used("c")), user(result("c"), TEXT)] * (n // 250),
    "thoughts": lambda n: [
        assistant(*repeated({"type": "thinking", "thinking": "x"})(n)), turn("user"),
    ],
    "parts of a result": lambda n: [
        assistant(used("c")), user({**result("c"), "content": repeated(TEXT)(n)}),
    ],
    "an input": lambda n: [assistant({**used("c"), "input": {"a": "x" * n}}), turn("user")],
}  # fmt: skip
TOOLS: dict[str, Grow] = {
    **{name: within(grow, lambda value: [function("f", value)]) for name, grow in SCHEMAS.items()},
    "tools": lambda n: [function(f"f{i}", {}) for i in range(n // 70)],
    "tools of one name": repeated(function("f", {})),
    "a name": lambda n: [function("x" * n, {})],
}
ITEMS: dict[str, Grow] = {
    **{
        f"{role} items": repeated(turn(role))
        for role in ("developer", "system", "user", "assistant")
    },
    "calls": repeated(item("function_call")),
    "outputs": repeated(item("function_call_output", output="x")),
    "calls and outputs": lambda n: (
        [item("function_call"), item("function_call_output", output="x")] * (n // 140)
    ),
    "reasoning": repeated(item("reasoning")),
    "references": repeated({"type": "item_reference", "id": "x"}),
    "parts": lambda n: [turn("user", content=repeated({"type": "input_text", "text": "x"})(n))],
    "wrong parts": lambda n: [turn("user", content=repeated(1)(n))],
    "output parts": lambda n: [
        item("function_call_output", output=repeated({"type": "text", "text": ""})(n))
    ],
    "a kind": lambda n: [{"type": "x" * n}],
}
INPUTS: dict[str, Grow] = {
    "ids": repeated([1, 2, 3]),
    "rows of ids": lambda n: [[1] * (n // 4)] * 2,
    "long texts": repeated("x" * 1000),
}
OWN: dict[str, dict[str, Grow]] = {
    "messages": MESSAGES | BLOCKS,
    "tools": TOOLS
    | {
        f"{name} of an input": within(
            grow, lambda schema: [{"name": "f", "input_schema": {**schema, "type": "object"}}]
        )
        for name, grow in SCHEMAS.items()
    }
    | {
        "many": lambda n: [
            {"name": f"f{i}", "input_schema": {"type": "object"}} for i in range(n // 51)
        ]
    },
    "system": {"blocks": repeated({"type": "text", "text": "x"}), "a text": lambda n: "x" * n},
    "stop_sequences": {"long ones": lambda n: ["x" * (n // 4)] * 4},
    "output_config": {
        name: within(grow, lambda schema: {"format": {"type": "json_schema", "schema": schema}})
        for name, grow in SCHEMAS.items()
    },
    "functions": {
        name: within(grow, lambda tools: [each["function"] for each in tools])
        for name, grow in TOOLS.items()
    },
    "tool_choice": {
        "a name": lambda n: {"type": "function", "function": {"name": "x" * n}},
        "a flat name": lambda n: {"type": "function", "name": "x" * n},
        "many": lambda n: {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto", "tools": repeated(function("f", None))(n)},
        },
        "many flat ones": lambda n: {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": repeated({"type": "function", "name": "f"})(n),
        },
    },
    "response_format": {name: form(grow) for name, grow in SCHEMAS.items()},
    "structured_outputs": {
        **{name: within(grow, lambda schema: {"json": schema}) for name, grow in SCHEMAS.items()},
        "a regex": lambda n: {"regex": "x" * n},
        "choices": lambda n: {"choice": repeated("x")(n)},
        "a grammar": lambda n: {"grammar": "x" * n},
    },
    "guided_json": SCHEMAS,
    "text": {
        name: within(
            grow, lambda schema: {"format": {"type": "json_schema", "name": "s", "schema": schema}}
        )
        for name, grow in SCHEMAS.items()
    },
    "input": ITEMS | INPUTS,
    "prompt": INPUTS,
    "logit_bias": {
        "wrong values": lambda n: {str(i): "x" for i in range(n // 12)},
        "wrong names": lambda n: {f"x{i}": 1 for i in range(n // 12)},
    },
    "stop": {"long ones": lambda n: ["x" * (n // 4)] * 4},
    "metadata": {"long ones": lambda n: {"a": "x" * n}},
    "reasoning": {"an effort": lambda n: {"effort": "x" * n}},
    "stream_options": {"what nobody knows": lambda n: {f"k{i}": i for i in range(n // 14)}},
    "include": {"what there is": repeated("message.output_text.logprobs")},
}
SHAPES = {endpoint.bare_path: endpoint.request for endpoint in ENDPOINTS if endpoint.request}


def understood(path: str, body: bytes, models: Catalog) -> object:
    """Do all that is done with a body before its model is asked, or word why it is refused."""
    try:
        asked: Any = read_request(body, SHAPES[path], strict=False, bounds=BOUNDS).request
        models.resolve(asked.model)
        return translated(path, asked)
    except GatewayError as error:
        return orjson.dumps(error.body())


def translated(path: str, asked: Any) -> object:
    """Make the jobs."""
    caller = Caller(request_id="r", deadline=1e9, allowed_s=60)
    bounds = CharBounds(CHARS, CHARS)
    given: dict[str, Any] = {}
    if path in ("/embeddings", "/embed_sparse", "/pooling"):
        given = {"accepts_ids": True, "truncate": True, "dimensions": None, "prompt_name": None}
        return embeddings.to_job(asked, caller, bounds=bounds, **given)
    if path in ("/rerank", "/score"):
        given = {"max_tokens_per_doc": None, "prompt_name": None}
        return rerank.to_job(asked, caller, bounds=bounds, **given)
    if path == "/decisions":
        return decisions.to_jobs(asked, caller, {}, bounds=bounds)
    if path == "/completions":
        return completions.to_jobs(asked, caller, Sampling(), bounds=bounds)
    given = {"template_args": {}, "max_chars": CHARS}
    if path.startswith("/messages"):
        return anthropic.to_job(asked, caller, Sampling(), **given)
    given["max_tokens"] = 16
    if path == "/chat/completions":
        return chat.to_job(asked, caller, Sampling(), schema_in_prompt=True, **given)
    items = responses_items.resolve_references(
        asked.input, lambda _: responses_items.read_item(b'{"role":"user"}')
    )
    return responses.to_job(asked, caller, Sampling(), items=items, **given)


def slow(
    path: str, shapes: Mapping[str, Mapping[str, Grow]], nbytes: int, models: Catalog
) -> list[str]:
    """List the fields whose time grows faster than their size, with the shapes that did it.

    A field that seems slow is measured again where no noise comes near a square, until it seems
    slow no more: beside other work anything may look so once.
    """
    found = []
    with uncollected():
        for name in FIELDS[path]:
            for how, grow in shapes.get(name, {}).items():
                small, large = (body(path, name, grow(n)) for n in (nbytes, TIMES * nbytes))
                if not exceeds(MOST, path, small, large, models, ROUNDS):
                    continue
                small, large = sure_bodies(path, name, grow, max(LARGE, TIMES * nbytes), models)
                if taken := exceeds(SURE_MOST, path, small, large, models, SURE_ROUNDS):
                    before, after = taken
                    found.append(f"{name}: {how}, {1e3 * before:.1f} → {1e3 * after:.1f} ms")
    return found


def sure_bodies(
    path: str, name: str, grow: Grow, most: int, models: Catalog
) -> tuple[bytes, bytes]:
    """Write two requests that are both read, or both refused.

    One beyond a bound of all requests is refused at once, and hides how long the others take.
    """
    while True:
        small, large = (body(path, name, grow(n)) for n in (most // SURE_TIMES, most))
        kinds = {type(understood(path, each, models)) for each in (small, large)}
        if len(kinds) == 1:
            return small, large
        most //= 2


def body(path: str, name: str, value: Any) -> bytes:
    """Write a request that is well but for one field."""
    return orjson.dumps({**POSTS[path], name: value})


def exceeds(
    most: float, path: str, small: bytes, large: bytes, models: Catalog, rounds: int
) -> tuple[float, float] | None:
    """Return the times of both if the large one costs more than `most` times the small one.

    Times are processor seconds of this thread, the least of some rounds.
    """
    before = after = math.inf
    for _ in range(rounds):
        after = min(after, least(lambda: understood(path, large, models), 1))
        if after <= NOTHING_S:
            return None
        before = min(before, least(lambda: understood(path, small, models), RUNS))
        if after <= most * before:
            return None
    return before, after


def least(work: Callable[[], object], runs: int) -> float:
    """Measure the least seconds that some runs took."""
    taken = []
    for _ in range(runs):
        started = time.thread_time()
        work()
        taken.append(time.thread_time() - started)
    return min(taken)


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep the garbage collector from walking the objects of all the other tests."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
