"""MiniMax M3's calls: nested elements, typed by the schema; a doubtful one is no call."""

import time
from contextlib import suppress
from typing import Any

import pytest

from gateway.engine.answers.call_values import Unfinished
from gateway.engine.answers.minimax_calls import MARK, read_minimax

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "tags": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
        "place": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]},
        "stops": {"type": "array", "items": {"$ref": "#/$defs/place"}},
        "sizes": {"type": "object", "additionalProperties": {"type": "number"}},
        "item": {"type": "object", "properties": {"item": {"type": "integer"}}},
        "either": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
        "free": {},
    },
    "$defs": {
        "place": {
            "allOf": [{"type": "object", "properties": {"zip": {"type": "string"}}}],
            "properties": {"near": {"$ref": "#/$defs/place"}, "floor": {"type": "integer"}},
        }
    },
}


def marked(text: str) -> str:
    """Return a text whose tags, written without it, have the mark."""
    return text.replace("<", f"{MARK}<")


def read(text: str) -> Any:
    """Return the arguments of a call that a text is."""
    body = marked(f'<invoke name="f">{text}</invoke>')
    calls, end = read_minimax(body, 0, {"f": SCHEMA}, ())
    assert end == len(body)
    assert [call["name"] for call in calls] == ["f"]
    return calls[0]["arguments"]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("", {}),
        ("<text>7</text><count>7</count>", {"text": "7", "count": 7}),
        ("\n<text> a\nb </text>\n", {"text": " a\nb "}),
        ("<tags><item>1</item><item>null</item></tags>", {"tags": ["1", "null"]}),
        ("<tags></tags><place></place>", {"tags": [], "place": {}}),
        ("<tags>null</tags>", {"tags": None}),
        ('<tags>["1"]</tags>', {"tags": ["1"]}),
        ("<place>\n<zip>1</zip>\n<floor>2</floor>\n</place>", {"place": {"zip": "1", "floor": 2}}),
        ("<place><near><zip>1</zip></near></place>", {"place": {"near": {"zip": "1"}}}),
        (
            "<stops><item><zip>1</zip></item><item><floor>2</floor></item></stops>",
            {"stops": [{"zip": "1"}, {"floor": 2}]},
        ),
        ("<sizes><a>1</a><b>2.5</b></sizes>", {"sizes": {"a": 1, "b": 2.5}}),
        ("<item><item>3</item></item>", {"item": {"item": 3}}),
        ("<free><a>1</a><b><item>x</item></b></free>", {"free": {"a": 1, "b": ["x"]}}),
        ("<other>x</other>", {"other": "x"}),
        ("<either><item>1</item></either>", {"either": ["1"]}),
        ("<either><b>bold</b></either>", {"either": marked("<b>bold</b>")}),
        ("<text><b>so</b> it is</text>", {"text": marked("<b>so</b> it is")}),
        ("<free><b>so</b> it is</free>", {"free": marked("<b>so</b> it is")}),
        ("<free><a>x</a><b></free>", {"free": marked("<a>x</a><b>")}),
    ],
)  # fmt: skip
def test_what_stands_in_elements_has_the_types_of_the_schema(text: str, arguments: Any) -> None:
    assert read(text) == arguments


@pytest.mark.parametrize(
    "text",
    [
        "<b>bold</b>",
        "<item>a</item>",
        "see <tool_call> here",
        "see </tool_call> here",
        "see </invoke> here",
        '<tool_call>\n<invoke name="f">\n<text>a</text>\n</invoke>\n</tool_call>',
        'see <tool_call><invoke name="g"> and </tool_call>',
        '<tool_call><invoke name="f"></invoke><invoke name="g"></invoke></tool_call>',
        "<a>1</a><a>2</a>",
    ],
)
def test_a_text_may_hold_tags_and_whole_calls(text: str) -> None:
    arguments = {"count": 1, "text": marked(text)}
    assert read(f"<count>1</count><text>{text}</text>") == arguments


@pytest.mark.parametrize(
    "text",
    [
        "<tags><item>see <item> tag</item></tags>",
        "<stops><item><zip>1</zip></item> and <item><zip>2</zip></item></stops>",
        "loose",
        "<text>a</text>loose",
        "<text>a</text>loose<count>1</count>",
        "<text>a</text><text>b</text>",
        "<text>see </text> here</text>",
        "<place><zip>1</zip><zip>2</zip></place>",
        "<tags><zip>1</zip></tags>",
        "<count><item>1</item></count>",
        "<count><b>1</b></count>",
        "<count>1<b></count>",
    ],
)
def test_text_between_arguments_or_a_name_twice_is_no_call(text: str) -> None:
    with pytest.raises(ValueError, match="between the parts, or a name twice"):
        read(text)


def test_a_call_cut_anywhere_or_too_deep_or_without_an_end_is_unfinished() -> None:
    body = marked('<invoke name="f"><free><a>1</a></free><text>a</text></invoke>')
    deep = marked('<invoke name="f">' + "<a>" * 100 + "</a>" * 100 + "</invoke>")
    doubtful = marked('<invoke name="f"><text>see <text> here</text></invoke>')
    for text in (*(body[:length] for length in range(len(body))), deep, doubtful):
        with pytest.raises(Unfinished):
            read_minimax(text, 0, {"f": SCHEMA}, ())


@pytest.mark.parametrize("text", ["Well, yes.", "<invoke>", MARK + "<city>", MARK + "<invoke>"])
def test_prose_begins_no_call(text: str) -> None:
    with pytest.raises(ValueError, match="no call") as raised:
        read_minimax(text + " " * 300, 0, {}, ())
    assert raised.type is ValueError


@pytest.mark.parametrize(
    "atom", ["<a>", "</a>", "<a></a>", "<a>x</a>", "<item>", "< ", "<invoke ", "<text>", "<a", MARK]
)
def test_a_long_call_is_read_in_time_in_proportion(atom: str) -> None:
    for begun in ("", "<free>", "<text>"):
        text = marked(f'<invoke name="f">{begun}{atom}')
        text += marked(atom) * (100_000 // len(marked(atom))) + marked("</text></free></invoke>")
        start = time.process_time()
        with suppress(ValueError):
            read_minimax(text, 0, {"f": SCHEMA}, ())
        assert time.process_time() - start < 1
