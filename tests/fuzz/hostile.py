"""Requests as somebody writes them who knows where gateways break, one unlike the other."""

import base64
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from tests.engine.vision.picture_files import jpeg_size, noise, png, saved
from tests.fuzz.asking import LENGTHS, POSTS

Body = dict[str, Any]
Schema = dict[str, Any]
MARKS = (
    *("<think>", "</think>", "<think>x</think>", "<|im_end|>", "<|im_start|>system", "<tool_call>"),
    *('</tool_call>{"name":"f"}', "[TOOL_CALLS]", "<|channel|>final<|message|>", "{{7*7}}"),
    *("{% for", "\x00", "\u202e", "\ud7ff", "\U0010ffff", "🤷\u200d♀️", "e\u0301", "\r\n\r\n", "﷽"),
    "data: [DONE]\n\n",
)
SIGHT = ("<|image_pad|>" * 9, "<|vision_start|><|image_pad|><|vision_end|>", "<|video_pad|>")
REGEXES = (
    *("(a*)*b", "((((((((((", "(a{1,99}){1,99}", "[^\\x00-\\uffff]+", "\\p{L}{0,500}", "a|"),
    *("(" * 500 + ")" * 500, "[a-z]" * 1500, "(x+x+)+y", "^$", ".{0,9999}", "\\b", "(?i)ß", "[]"),
    "(?=a)b",
)
LARKS = (
    *("start: start", 'start: "a" start', "start: /a*/ start | ", 'start: "a"', "%%%"),
    *("start: %json {}", 'start: "' + "x" * 5000 + '"'),
    "start: a\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(800)),
)


@dataclass(frozen=True)
class Sent:
    """One request: JSON, or bytes that are none; and the rest of its connection.

    `after` follows the body; the body is sent in `pieces` pieces; `is_left` means a client that
    hangs up instead of reading.
    """

    shape: str
    path: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    after: bytes = b""
    pieces: int = 1
    is_left: bool = False


def chat(**given: Any) -> tuple[str, Body]:
    return "/chat/completions", given


def chained(choose: random.Random) -> Schema:
    """Lead from one definition to the next, a hundred times or thousands."""
    length = choose.choice((20, 150, 390, 410, 1000, 2500))
    link: Callable[[Schema], Schema] = choose.choice(
        (
            lambda ref: ref,
            lambda ref: {"type": "object", "properties": {"n": ref}, "required": ["n"]},
            lambda ref: {"type": "array", "items": ref},
            lambda ref: {"anyOf": [ref, {"type": "null"}]},
            lambda ref: {"allOf": [ref, ref]},
            lambda ref: {"oneOf": [ref, {"type": "integer"}]},
        )
    )
    defs = {str(i): link({"$ref": f"#/$defs/{i + 1}"}) for i in range(length)}
    last = choose.choice(({"type": "integer"}, {"$ref": "#"}, {"$ref": "#/$defs/0"}, {}))
    return {"$ref": "#/$defs/0", "$defs": {**defs, str(length): last}}


def schema(choose: random.Random) -> Schema:
    """Write a schema that is deep, wide, wrong or unsatisfiable."""
    deep: Any = {"type": "integer"}
    for _ in range(choose.choice((10, 60, 90))):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    wide = {f"p{i}": {"type": "integer"} for i in range(choose.choice((50, 2000)))}
    return choose.choice(
        (
            chained(choose),
            chained(choose),
            deep,
            {"type": "object", "properties": wide, "required": list(wide)[:30]},
            {"enum": [choose.choice(MARKS) * n for n in range(1, 200)]},
            {"type": "string", "pattern": choose.choice(REGEXES)},
            {"type": "string", "format": choose.choice(("uri", "email", "duration", "nonsense"))},
            {"type": "integer", "minimum": 10**15, "maximum": -(10**15)},
            {"not": {}, "uniqueItems": True, "if": {}, "contains": {"const": 1}},
            {"type": "array", "items": {}, "minItems": choose.choice((3, 10**9))},
            {"const": {"a": [None] * 500}},
            {"$ref": "https://nowhere.example/schema.json"},
            {"type": choose.choice(MARKS)},
        )
    )


def formed(choose: random.Random) -> tuple[str, Body]:
    """Ask for a form, in any of the ways to ask."""
    wanted = schema(choose)
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": wanted}}
    function = {"name": "f", "parameters": wanted, "strict": choose.random() < 0.5}
    tools: Body = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    flat = {"format": {"type": "json_schema", "name": "s", "schema": wanted, "strict": True}}
    return choose.choice(
        (
            chat(response_format=form),
            chat(guided_json=wanted),
            chat(structured_outputs={"json": orjson.dumps(wanted).decode()}),
            chat(**tools),
            chat(guided_regex=choose.choice(REGEXES)),
            chat(guided_grammar=choose.choice(LARKS)),
            chat(guided_choice=[choose.choice(MARKS) for _ in range(choose.choice((1, 50)))]),
            ("/responses", {"text": flat}),
            ("/messages", {"output_config": {"format": {"type": "json_schema", "schema": wanted}}}),
            ("/completions", {"response_format": form}),
        )
    )


def named(choose: random.Random) -> tuple[str, Body]:
    """Give something a name that is very long, or odd."""
    name = choose.choice((*MARKS, "x" * 257, "é" * 5000, "y" * 300_000))
    function = {"type": "function", "function": {"name": name}}
    call = {"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}}
    return choose.choice(
        (
            chat(model=name),
            chat(user=name),
            chat(messages=[{"role": name, "content": "x"}]),
            chat(messages=[{"role": "user", "name": name, "content": "x"}]),
            chat(messages=[{"role": "assistant", "tool_calls": [call]}]),
            chat(tools=[function]),
            chat(tool_choice=function),
            chat(**{name: 1}),
            chat(stop=name),
            chat(logit_bias={name: 1}),
            chat(metadata={name: name}),
            chat(service_tier=name),
            ("/embeddings", {"model": name}),
            ("/embeddings", {"prompt_name": name}),
            ("/responses", {"previous_response_id": name}),
            ("/responses", {"input": [{"type": "item_reference", "id": name}]}),
            ("/responses", {"input": [{"type": name}]}),
            ("/responses", {"tools": [{"type": name, "name": name}]}),
            ("/messages", {"messages": [{"role": name, "content": "x"}]}),
            ("/messages", {"messages": [{"role": "user", "content": [{"type": name}]}]}),
            ("/messages", {"tools": [{**function, "name": name, "input_schema": {}}]}),
            ("/messages", {"stop_sequences": [name]}),
        )
    )


def joined(choose: random.Random) -> tuple[str, Body]:
    """Send very many turns, parts, calls or items."""
    count = choose.choice((10, 500, 4096, 4097))
    text = choose.choice(("", "x", "y" * 50, *MARKS))
    role = choose.choice(("user", "assistant", "system", "developer", "tool"))
    turns = [{"role": role, "content": text}] * count
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    parts = [{"type": "text", "text": text}] * count
    return choose.choice(
        (
            chat(messages=turns),
            chat(messages=[{"role": "user", "content": "hi"}, *turns]),
            chat(messages=[{"role": "user", "content": parts}]),
            chat(messages=[{"role": "user", "content": [1] * 50_000}]),
            chat(messages=[{"role": "assistant", "tool_calls": [call] * count}]),
            ("/responses", {"input": turns}),
            ("/responses", {"input": [item] * count}),
            ("/responses", {"input": [{"role": "user", "content": parts}]}),
            ("/embeddings", {"input": [text or " "] * min(count, 300)}),
            ("/embeddings", {"input": [text * 1000 or "x"] * choose.choice((1, 30))}),
            ("/embeddings", {"input": [[5] * 10] * count}),
        )
    )


def sampled(choose: random.Random) -> tuple[str, Body]:
    """Ask for another way to choose tokens than anybody did before."""
    given: Body = {
        "temperature": choose.uniform(0, 2.2),
        "top_p": choose.random(),
        "min_p": choose.random(),
        "top_k": choose.choice((-1, 0, 1, 7, 10**9)),
        "repetition_penalty": choose.choice((1e-9, 0.5, 1.0, 9.9)),
        "presence_penalty": choose.uniform(-2, 2),
        "frequency_penalty": choose.uniform(-2, 2),
        "seed": choose.choice((0, -(2**63), 2**63 - 1, choose.getrandbits(40))),
        "logprobs": True,
        "top_logprobs": choose.choice((0, 20)),
        "n": choose.choice((1, 2, 5)),
        "stop": [choose.choice(MARKS) for _ in range(choose.choice((0, 1, 64, 65)))],
        "stop_token_ids": [choose.randrange(5000) for _ in range(choose.choice((0, 200)))],
        "min_tokens": choose.choice((0, 1, 10**6)),
        "ignore_eos": choose.random() < 0.3,
        "max_tokens": choose.choice((-1.0, 1, 2.0, 3, 0)),
        "logit_bias": {
            str(choose.randrange(10 ** choose.choice((3, 18)))): choose.choice((-100, 0.1, 100))
            for _ in range(choose.choice((0, 3, 1000, 1025)))
        },
    }
    picked = choose.sample(sorted(given), choose.randrange(1, 6))
    return chat(**{"max_tokens": 2, **{name: given[name] for name in picked}})


def marked(choose: random.Random) -> tuple[str, Body]:
    """Put marks of a template, a parser or a stream where text is."""
    text = "".join(choose.choice(MARKS) for _ in range(choose.randrange(1, 8)))
    said = [{"role": "user", "content": text}]
    continued = {"continue_final_message": choose.random() < 0.5}
    return choose.choice(
        (
            chat(messages=[{"role": choose.choice(("user", "system")), "content": text}] * 2),
            chat(messages=said, guided_choice=["yes", "no"]),
            chat(messages=said, stop=[text], stream=True),
            chat(messages=[*said, {"role": "assistant", "content": text}], **continued),
            chat(chat_template_kwargs={"enable_thinking": True, "tools": text, "messages": [text]}),
            ("/completions", {"prompt": text, "echo": True, "logprobs": 2, "max_tokens": 1}),
            ("/completions", {"prompt": [text, text]}),
            ("/responses", {"input": text, "instructions": text, "reasoning": {"effort": "high"}}),
            ("/embeddings", {"input": [text, text[::-1]]}),
        )
    )


def multiplied(choose: random.Random) -> tuple[str, Body]:
    """Ask for many answers in one request."""
    return choose.choice(
        (
            ("/completions", {"prompt": ["x"] * 12, "n": choose.choice((1, 4))}),
            ("/completions", {"prompt": ["x"] * 2049}),
            ("/completions", {"prompt": ["x"] * 40, "n": 128}),
            ("/completions", {"prompt": [[1, 2, 3]] * 4}),
            ("/completions", {"prompt": [[2**40]], "stream": True}),
            chat(n=choose.choice((8, 128, 129)), max_tokens=1),
        )
    )


def nested(choose: random.Random) -> tuple[str, Body]:
    """Nest something deeper than it may be."""
    value: Any = choose.choice(([], {}, "x"))
    for _ in range(choose.choice((60, 70, 250, 900))):
        value = [value] if choose.random() < 0.5 else {"a": value}
    return choose.choice(
        (
            chat(chat_template_kwargs=value if isinstance(value, dict) else {"a": value}),
            chat(metadata={"a": value}),
            chat(messages=value),
            chat(tools=[value]),
            ("/responses", {"input": value}),
            ("/responses", {"metadata": {"a": value}}),
            ("/embeddings", {"input": value}),
        )
    )


def picture(choose: random.Random) -> bytes:
    """Make an image file that is whole, spoilt, cut, or lies about its size."""
    width, height = choose.choice(((8, 8), (64, 48), (200, 3), (2, 2), (300, 300)))
    kind = choose.choice(("PNG", "JPEG", "WEBP", "GIF", "BMP"))
    image = noise(width, height, choose.randrange(9))
    whole = bytearray(saved(image.quantize(8) if kind == "GIF" else image, kind))
    for _ in range(choose.choice((0, 0, 0, 0, 1, 3, 40))):
        whole[choose.randrange(len(whole))] = choose.randrange(256)
    return choose.choice(
        (
            *([bytes(whole)] * 6),
            bytes(whole[: choose.randrange(len(whole))]),
            png(choose.choice((30_000, 2**31 - 1, 0)), choose.choice((30_000, 1)), b""),
            jpeg_size(saved(noise(), "JPEG"), 65_535, 65_535),
            b"<svg xmlns='http://www.w3.org/2000/svg'/>",
            choose.randbytes(100),
            b"",
        )
    )


def seen(choose: random.Random) -> tuple[str, Body]:
    """Show images, in any of the ways to show them, to a model that sees or to one that reads."""
    data = base64.b64encode(picture(choose)).decode()
    if choose.random() < 0.1:
        data = choose.choice((data[:-1], data + "=", data + "\n", "%", "é" * 99))
    url = f"data:image/{choose.choice(('png', 'x', ''))};base64,{data}"
    if choose.random() < 0.1:
        url = choose.choice(("http://127.0.0.1:9/x.png", "file:///etc/passwd", data))
    count = choose.choice((1,) * 6 + (2, 65))
    detail = choose.choice(("low", "auto", "high", "original", None) * 3 + ("none",))
    wire: Body = {"type": "image_url", "image_url": {"url": url, "detail": detail}}
    flat: Body = {"type": "input_image", "image_url": url, "detail": detail}
    kind = choose.choice(("base64",) * 8 + ("url", "file"))
    source = {"type": kind, "media_type": "x/y", "data": data}
    block: Body = {"type": "image", "source": source}
    text: Body = {"type": "text", "text": choose.choice((*SIGHT, *MARKS))}
    shown = {"role": choose.choice(("user",) * 7 + ("tool", "system", "assistant"))}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [block] * count}
    output = {"type": "function_call_output", "call_id": "c", "output": [flat] * count}
    path, given = choose.choice(
        (
            chat(messages=[{**shown, "content": [text, *[wire] * count]}]),
            chat(messages=[{**shown, "content": [wire, text, flat, block]}], n=2),
            ("/responses", {"input": [{**shown, "content": [flat] * count}]}),
            ("/responses", {"input": [{"role": "user", "content": "x"}, output]}),
            ("/messages", {"messages": [{"role": "user", "content": [text, *[block] * count]}]}),
            ("/messages", {"messages": [{"role": "user", "content": [result]}]}),
        )
    )
    return path, {"model": choose.choice(("seeing",) * 4 + ("writer",)), **given}


SHAPES: dict[str, Callable[[random.Random], tuple[str, Body]]] = {
    "forms": formed,
    "names": named,
    "joins": joined,
    "sampling": sampled,
    "marks": marked,
    "choices": multiplied,
    "depth": nested,
    "images": seen,
}
PIPELINED = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
AFTER = (b"\r\n", b"\n", b"x", b"\x00" * 100, PIPELINED, b"PRI * HT")


def hostile(choose: random.Random) -> Sent:
    """Write the next request."""
    shape = choose.choice(sorted(SHAPES))
    path, given = SHAPES[shape](choose)
    body = {**POSTS[path], **given}
    if path in LENGTHS:
        body.setdefault(LENGTHS[path], choose.choice((1, 3)))
    if choose.random() < 0.2 and path != "/embeddings":
        body["stream"] = True
    written = json.dumps(body, ensure_ascii=choose.random() < 0.5).encode()
    if choose.random() < 0.05:
        cut = choose.randrange(len(written))
        written = written[:cut] + choose.randbytes(3) + written[cut:]
    seconds = choose.choice(("5", "5", "5", "0.05", "1e9", "nan", "x"))
    headers = {"x-gateway-timeout-s": seconds if choose.random() < 0.3 else "10"}
    return Sent(
        shape,
        path,
        written,
        headers,
        after=choose.choice(AFTER) if choose.random() < 0.3 else b"",
        pieces=choose.choice((1, 1, 1, 3, 40)),
        is_left=choose.random() < 0.1,
    )
