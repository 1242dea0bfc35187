"""Bodies of calls in JSON, Python and Gemma's form: each ends by its own brackets.

Another mark stands behind each body. A broken body is no call, and never a shorter one.
"""

import json
import time
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.engine.answers.call_bodies import (
    read_arguments,
    read_deepseek,
    read_json,
    read_kimi,
    read_mistral,
    read_python,
)
from gateway.engine.answers.call_values import ReadBody, Unfinished
from gateway.engine.answers.gemma_calls import read_gemma

END = "</call>"
SCHEMAS: dict[str, dict[str, Any]] = {
    "f": {"properties": {"a": {}, "b": {}}, "required": ["a"]},
    "g": {"properties": {"n": {}}},
    "a.b-c": {},
}
SEP, ARGUMENTS = "<｜tool▁sep｜>", "<|tool_call_argument_begin|>"
HOSTILE = [
    *(
        '"',
        "'",
        "\\",
        "{",
        "}",
        "[",
        "]",
        '{"',
        '","',
        ",'",
        "</call>",
        '<|"|>',
        '<|"|>,',
        '<|"|>}',
    ),
    *('<|"|>,a:', '"""', "a-", ",", "a,", " ", "\n", "call:", "='", '"a" ', "(", ")", "}}]"),
]
BODIES: dict[ReadBody, list[str]] = {
    read_json: [
        '{"name": "f", "arguments": {"a": "%s"}}',
        "{'name': 'f', 'arguments': {'a': '%s'}}",
    ],
    read_mistral: ['f[ARGS]{"a": "%s"}'],
    read_deepseek: [f'f{SEP}{{"a": "%s"}}', f'function{SEP}f\n```json\n{{"a": "%s"}}'],
    read_kimi: [f'functions.f:0{ARGUMENTS}{{"a": "%s"}}'],
    read_python: ['[f(a="%s")]', "[f(a='%s')]", 'f.call(a="%s")'],
    read_gemma: [
        'call:f{a:<|"|>%s<|"|>}',
        "call:f{a:<escape>%s<escape>}",
        'call:f(a=<|"|>%s<|"|>)',
    ],
}
FORMS = [(read, form) for read, forms in BODIES.items() for form in forms]


def arguments_of(read: ReadBody, body: str) -> Any:
    """Read a body with text around it; return its one call's arguments, None if it is no call."""
    calls, end = read(f"{END}{body}{END}", len(END), SCHEMAS, (END,))
    if not calls:
        return None
    assert end == len(END) + len(body)
    (call,) = calls
    assert call["name"] == "f"
    return call["arguments"]


@pytest.mark.parametrize(("read", "form"), FORMS)
@pytest.mark.parametrize(
    "text", ["", "x", "see </call> here", "{[(", "}])", "line\nline\ttab", "{}, [1]: (x)"]
)
def test_a_body_ends_with_its_last_bracket_whatever_its_texts_hold(
    read: ReadBody, form: str, text: str
) -> None:
    assert arguments_of(read, form % text) == {"a": text}


@pytest.mark.parametrize(("read", "form"), FORMS)
def test_a_body_cut_anywhere_is_unfinished(read: ReadBody, form: str) -> None:
    body = form % "see </call> (here), [and] {there}"
    for length in range(len(body)):
        with pytest.raises(Unfinished):
            read(body[:length], 0, SCHEMAS, ())


@pytest.mark.parametrize(("read", "form"), FORMS)
@pytest.mark.parametrize("text", ["Well, yes.", "<b>", "3"])
def test_prose_begins_no_body(read: ReadBody, form: str, text: str) -> None:
    with pytest.raises(ValueError, match=r"no") as raised:
        read(f"{text} {form}", 0, SCHEMAS, ())
    assert raised.type is ValueError


@pytest.mark.parametrize(("read", "form"), FORMS)
@pytest.mark.parametrize("atom", HOSTILE)
def test_a_long_body_is_read_in_time_in_proportion(read: ReadBody, form: str, atom: str) -> None:
    """A quadratic reader takes a minute for them."""
    for text in (form.partition("%s")[0], ""):
        start = time.process_time()
        with suppress(ValueError):
            read(text + atom * (100_000 // len(atom)) + "]})", 0, SCHEMAS, (END,))
        assert time.process_time() - start < 1


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"name":"f","arguments":{"a":"\\d+ \\w \\users"}}', {"a": "\\d+ \\w \\users"}),
        ('{"name":"f","arguments":{"a":"It\\\'s \\"so\\" \\u00e9"}}', {"a": 'It\'s "so" é'}),
        (
            "{'name': 'f', 'arguments': {'a': True, 'b': [None, 'x\ny']}}",
            {"a": True, "b": [None, "x\ny"]},
        ),
        ("{'name': 'f', 'arguments': {'a': true, 'b': null}}", {"a": True, "b": None}),
        ("{'name': 'f', 'arguments': {'a': '\\d \\'x\\''}}", {"a": "\\d 'x'"}),
        ('{"name":"f","arguments":"{\\"a\\": 1}"}', {"a": 1}),
        ('{"name":"f","arguments":{"a":{"b":{}}}', {"a": {"b": {}}}),
        ('{"type":"function","function":{"name":"f","parameters":{"a":1}}}', {"a": 1}),
        ('[{"tool_name":"f","parameters":{"a":1}}]', {"a": 1}),
        ('{"name":"f"}', {}),
        # Broken ones.
        ('{"name":"f","arguments":{"a":{"b":{}}', None),
        ('[{"name":"f","arguments":{"a":1}}', None),
        ('{"name":"f","arguments":{"a":"say "hi" now"}}', None),
        ('{"name":"f","arguments":{"a":1]}}', None),
        ('{"name":"f","arguments":{"a":1,,}}', None),
        ('{"name":"f","arguments":[1]}', None),
        ('{"name":"f","arguments":"no"}', None),
        ('{"arguments":{}}', None),
        ("[[]]", None),
        ("[]", None),
        ("[" * 9999 + "]" * 9999, None),
        ('{"name":"f","arguments":{"a":' + "9" * 9999 + "}}", None),
    ],
)
def test_json_is_mended_where_there_is_no_doubt(body: str, arguments: Any) -> None:
    assert arguments_of(read_json, body) == arguments


def test_a_brace_is_missing_only_before_a_closing_mark() -> None:
    with pytest.raises(Unfinished):
        read_json('{"name":"f","arguments":{"a":1}', 0, SCHEMAS, (END,))


@pytest.mark.parametrize("text", ["", " \n"])
def test_arguments_without_text_are_none(text: str) -> None:
    assert read_arguments("f", text) == {"name": "f", "arguments": {}}


@pytest.mark.parametrize(
    ("call_id", "own_id"),
    [
        ("functions.f:0", "functions.f:0"),
        ("functions.f:12 ", "functions.f:12"),
        ("functions_f_1", None),
        ("functions.f", None),
        ("f", None),
        ("f:0", None),
        ("functions.f:call_0", None),
        ("call_x1", None),
    ],
)
def test_a_kimi_call_is_named_by_ids_of_any_form(call_id: str, own_id: str | None) -> None:
    (call,), _ = read_kimi(f'{call_id}{ARGUMENTS}{{"a":1,"b":2}}', 0, SCHEMAS, ())
    assert (call["name"], call.get("id")) == ("f", own_id)


@pytest.mark.parametrize(
    ("call_id", "arguments", "name"),
    [
        ("functions.a.b-c:3", {}, "a.b-c"),
        ("functions.unknown:0", {}, "unknown"),
        ("call_1", {"n": 1}, "g"),
        ("call_1", {"b": 1}, None),  # f requires more
        ("call_1", {}, None),  # two that it fits
        ("unknown", {"n": 1}, None),
        ("functions.f", [], None),
    ],
)
def test_a_kimi_call_without_a_name_is_the_one_that_fits(
    call_id: str, arguments: Any, name: str | None
) -> None:
    calls, _ = read_kimi(call_id + ARGUMENTS + json.dumps(arguments), 0, SCHEMAS, ())
    assert [call["name"] for call in calls] == ([name] if name else [])


@pytest.mark.parametrize("head", ["f{", "f[ARGS]{", "f[CALL_ID]Ab3dE6gh9[ARGS]{", "f [ARGS] {"])
def test_mistral_marks_are_left_out_or_not(head: str) -> None:
    assert arguments_of(read_mistral, head + '"a": 1}') == {"a": 1}


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ("[f(a='It's', b='it's')]", {"a": "It's", "b": "it's"}),
        ("[f(a='x' 'y')]", {"a": "xy"}),
        ('[f(a="say "hi" now")]', {"a": 'say "hi" now'}),
        ('[f(a="\\d\\n", b=r"\\n")]', {"a": "\\d\n", "b": "\\n"}),
        ('[f(a="""x\n"y" ]) """)]', {"a": 'x\n"y" ]) '}),
        ("[f(a={'k-l': null, \"m\": [true]})]", {"a": {"k-l": None, "m": [True]}}),
        ("[f(a-b=1, class=2)]", {"a-b": 1, "class": 2}),
        ("[f(a='true = (null)')]", {"a": "true = (null)"}),
        ('[f.call(a="x")]', {"a": "x"}),
        ('[{"name":"f","parameters":{"a":1}}]', {"a": 1}),
        ("f()", {}),
        # Broken ones, or programs.
        ("[f(a='%s' % x, b='y')]", None),
        ("[f(a=open('x'))]", None),
        ("[f(a='x'), 3]", None),
        ("[f(*[1])]", None),
        ("[" * 999 + "]" * 999, None),
        ("[f(a=1)", None),
    ],
)
def test_python_is_mended_where_there_is_no_doubt(body: str, arguments: Any) -> None:
    assert arguments_of(read_python, body) == arguments


def test_python_names_may_have_dashes_and_dots() -> None:
    calls, _ = read_python("[a.b-c(x=1), if(y=2)]", 0, SCHEMAS, ())
    assert [call["name"] for call in calls] == ["a.b-c", "if"]


def test_python_without_brackets_calls_only_functions_that_are_offered() -> None:
    with pytest.raises(ValueError, match="no function"):
        read_python("print(a=1)", 0, SCHEMAS, ())


D = '<|"|>'


@pytest.mark.parametrize(
    ("pairs", "arguments"),
    [
        ("", {}),
        ("a:DD,b:D D", {"a": "", "b": " "}),
        ("a:[DxD,DyD],b:{k:DvD}", {"a": ["x", "y"], "b": {"k": "v"}}),
        ("a:[DD,[],{}, [1]]", {"a": ["", [], {}, [1]]}),
        ("a: [ DxD , DyD ] , b : 3 ", {"a": ["x", "y"], "b": 3}),
        ("\n a:\n DxD\n,\n b:\n 1\n", {"a": "x", "b": 1}),
        ("a:Dprint(DhiD)D,b:5", {"a": 'print("hi")', "b": 5}),
        ("a:DDDD x DDD,b:1", {"a": '""" x ""', "b": 1}),
        ("a:D{k:DxD}y}D,b:[D[DzD]qD]", {"a": '{k:"x"}y}', "b": ['["z"]q']}),
        ("a:Dx</call>yD", {"a": "x</call>y"}),
        ('a:D"quoted"D', {"a": '"quoted"'}),
        ("a:D<escape>D", {"a": "<escape>"}),
        (
            "user-id:D1D,$ref:2,a.b:3,DkeyD:4,two words:5",
            {"user-id": "1", "$ref": 2, "a.b": 3, "key": 4, "two words": 5},
        ),
        ("'a':'x', \"b\":\"it's\"", {"a": "x", "b": "it's"}),
        ('a:\'it\'s\',b:"say \\"x\\" "', {"a": "it's", "b": 'say "x" '}),
        ("a:True,b:[None,false,null]", {"a": True, "b": [None, False, None]}),
        ("a:007,b:-1.5e3", {"a": "007", "b": -1500.0}),
        ("a:NaN", {"a": "NaN"}),
        ("a:Rome, ItalyD,b:fast", {"a": "Rome, Italy", "b": "fast"}),
        ("a:D\\n\\dD", {"a": "\\n\\d"}),
        ("a:1,", {"a": 1}),
    ],
)
def test_gemma_values_end_where_a_pair_or_a_bracket_follows(pairs: str, arguments: Any) -> None:
    assert arguments_of(read_gemma, f"call:f{{{pairs}}}".replace("D", D)) == arguments


@pytest.mark.parametrize("pairs", ["a", "1", "a:", "a:DxD y", "a:[1}", "a:(1)", "a:{b:1]}", ":1"])
def test_gemma_arguments_that_are_broken_are_no_call(pairs: str) -> None:
    with pytest.raises(Unfinished):
        read_gemma(f"call:f{{{pairs}}}{END}".replace("D", D), 0, SCHEMAS, (END,))


@pytest.mark.parametrize("following", ["", "}", "\n", " call:g{}", "<|tool_call>call:g{}"])
def test_a_gemma_call_ends_where_another_begins(following: str) -> None:
    body = f"call:f{{a:{D}x{D}}}"
    (call,), end = read_gemma(body + following, 0, SCHEMAS, (END,))
    assert (call["arguments"], end) == ({"a": "x"}, len(body))


def test_gemma_names_may_have_dashes_and_dots() -> None:
    (call,), _ = read_gemma("call:a.b-c{}", 0, SCHEMAS, ())
    assert call == {"name": "a.b-c", "arguments": {}}


KEYS = st.from_regex(r"[\w$-]{1,9}", fullmatch=True)
LETTERS = st.text(st.sampled_from("abé\n\t \\\"'{}[](),:=<>/|")) | st.sampled_from(
    [END, "null", "1"]
)
TEXTS = LETTERS.filter(lambda text: D not in text)  # D is a quote in a text of Gemma's
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


def gemma(value: Any) -> str:
    """Write a value as Gemma 4's template does."""
    match value:
        case str():
            return f"{D}{value}{D}"
        case list():
            return f"[{','.join(map(gemma, value))}]"
        case dict():
            return "{" + ",".join(f"{key}:{gemma(each)}" for key, each in value.items()) + "}"
    return json.dumps(value)


@pytest.mark.generator(weight=1)
@settings(max_examples=200, deadline=None)
@given(arguments=st.dictionaries(KEYS, VALUES, max_size=4))
def test_any_arguments_are_read_as_they_were_written(arguments: dict[str, Any]) -> None:
    written = json.dumps(arguments)
    named = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    call = {"name": "f", "arguments": arguments}
    for read, body in (
        (read_json, json.dumps(call)),
        (read_json, json.dumps([call], ensure_ascii=False)),
        (read_json, repr(call)),
        (read_mistral, f"f[ARGS]{written}"),
        (read_deepseek, f"f{SEP}{written}"),
        (read_kimi, f"functions.f:0{ARGUMENTS}{written}"),
        (read_python, f"[f({named})]"),
        (read_gemma, f"call:f{gemma(arguments)}"),
    ):
        assert arguments_of(read, body) == arguments, body
        for length in range(0, len(body), 17):
            with pytest.raises(Unfinished):
                read(body[:length], 0, SCHEMAS, ())
