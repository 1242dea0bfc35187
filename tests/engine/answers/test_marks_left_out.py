"""Calls whose marks are missing or misplaced, as models really write them: read where nothing is in
doubt, and else text.

Sources: vLLM #54838, #48931, #33646; SGLang #40236; Ollama #17276, #18563; llama.cpp #16755;
exo #1344; omlx #3153.
"""

from pathlib import Path
from typing import Any

import pytest

from gateway.engine.answers.minimax_calls import MARK
from gateway.engine.answers.parsing import ASIDE_SIZE
from gateway.engine.prompting.chat_tokenizer import ChatTokenizer
from gateway.jobs.chat import Calling, Function
from tests.engine.chat_formats import family, gathered, row, said

WRITE = Function(
    "write",
    {
        "type": "object",
        "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
        "required": ["path"],
    },
)
THINK = ("<think>", "</think>")
QWEN = {
    "added": ("<tool_call>", "</tool_call>", *THINK),
    "words": "<tool_call>\n<function= <think>",
}
GLM: dict[str, Any] = {"added": ("<tool_call>", "</tool_call>"), "words": "<arg_key>"}
HERMES: dict[str, Any] = {
    "added": ("<tool_call>", "</tool_call>", *THINK),
    "words": "<tool_call> <think>",
}
MINIMAX: dict[str, Any] = {"words": "<minimax:tool_call>"}
DSML: dict[str, Any] = {"words": "｜DSML｜"}
SPACED: dict[str, Any] = {"words": "<｜DSML｜ calls>"}
M3: dict[str, Any] = {"tokens": (MARK,), "words": MARK}
KIMI: dict[str, Any] = {
    "tokens": (
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    ),
    "added": THINK,
    "words": "<|tool_calls_section_begin|> <think>",
}  # fmt: skip
GIVEN = {
    "qwen": QWEN, "glm": GLM, "hermes": HERMES, "minimax": MINIMAX, "dsml": DSML, "kimi": KIMI,
    "spaced": SPACED, "m3": M3,
}  # fmt: skip

_QWEN, _QWEN_END = "<tool_call>\n<function=write>\n", "</function>\n</tool_call>"
_PATH = "<parameter=path>\na.py\n</parameter>\n"
_CONTENT = "<parameter=content>\nx\n</parameter>\n"
_KEYS = ("<arg_key>path</arg_key>\n<arg_value>", "<arg_key>content</arg_key>\n<arg_value>")
_JSON = '{"name": "write", "arguments": {"path": "a.py", "content": "x"}}'
_KIMI = 'functions.write:0<|tool_call_argument_begin|>{"path": "a.py", "content": "x"}'
_BLOCK = "<｜DSML｜function_calls>\n"
_DSML = '<｜DSML｜invoke name="write">\n<｜DSML｜parameter name="path" string="true">a.py'
_DSML_CONTENT = '<｜DSML｜parameter name="content" string="true">x</｜DSML｜parameter>\n'
_DSML_BARE = f"{_DSML}</｜DSML｜parameter>\n{_DSML_CONTENT}</｜DSML｜invoke>"
_M3 = '<tool_call>\n<invoke name="write"><path>a.py</path><content>x</content></invoke>'
CALL = ("write", {"path": "a.py", "content": "x"})


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatTokenizer]:
    return {name: family(tmp_path_factory.mktemp(name), **given) for name, given in GIVEN.items()}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen", f"{_QWEN}{_PATH}<parameter=content>\nx\n{_QWEN_END}"),
        ("qwen", f"{_QWEN}<parameter=path>\na.py\n{_CONTENT}{_QWEN_END}"),
        ("qwen", f"<function=write>\n{_PATH}{_CONTENT}</function>\n</tool_call>"),
        ("qwen", f"<tool_call>\n<function=write>\n{_PATH}{_CONTENT}</function>"),
        ("qwen", f"<tool_call>\n<function=write>\n{_PATH}{_CONTENT}"),
        ("glm", f"<tool_call>write\n{_KEYS[0]}a.py</arg_value>\n{_KEYS[1]}x</arg_value>\n"),
        ("glm", f"<tool_call>write\n{_KEYS[0]}a.py\n{_KEYS[1]}x</arg_value>\n</tool_call>"),
        ("glm", f"<tool_call>write{_KEYS[0]}a.py{_KEYS[1]}x</arg_value></tool_call>"),
        ("glm", f"<tool_call>write\n{_KEYS[0]}a.py</arg_value>\n{_KEYS[1]}x\n</tool_call>"),
        ("glm", f"<tool_call>write\n{_JSON}\n</tool_call>".replace("write\n", "", 1)),
        ("hermes", f"<tool_call>\n{_JSON}"),
        ("hermes", f"<tool_call>\n{_JSON}\n}}\n</tool_call>"),
        ("minimax", '<minimax:tool_call>\n<invoke name="write">\n<parameter name="path">a.py\n'
         '<parameter name="content">x</parameter>\n</invoke>\n</minimax:tool_call>'),
        ("minimax", '<minimax:tool_call>\n<invoke name="write">\n<parameter name="path">a.py'
         '</parameter>\n<parameter name="content">x</parameter>\n</invoke>\n'),
        ("dsml",
         f"{_BLOCK}{_DSML}\n{_DSML_CONTENT}</｜DSML｜invoke>\n</｜DSML｜function_calls>"),
        ("dsml",
         f"{_DSML}</｜DSML｜parameter>\n{_DSML_CONTENT}</｜DSML｜invoke>\n</｜DSML｜tool_calls>"),
        ("dsml",
         f"<｜DSML｜tool_calls>\n{_DSML}</｜DSML｜parameter>\n{_DSML_CONTENT}</｜DSML｜invoke>"),
        ("spaced", _DSML_BARE.replace("｜DSML｜", "｜DSML｜ ")),
        ("m3", _M3.replace("<", f"{MARK}<")),
        ("m3", _M3.replace("<", f"{MARK}\n<").replace("\n", "", 1) + f"{MARK}</tool_call>"),
        ("kimi",
         f"<|tool_calls_section_begin|><|tool_call_begin|>{_KIMI}<|tool_calls_section_end|>"),
        ("kimi", f"<|tool_call_begin|>{_KIMI}<|tool_call_end|>"),
    ],
)  # fmt: skip
def test_a_whole_call_is_read_without_some_of_its_marks(
    chats: dict[str, ChatTokenizer], name: str, text: str
) -> None:
    heard = said(chats[name], row([WRITE]), text)
    assert heard["calls"] == [CALL]
    assert not heard["text"].strip()


def test_two_calls_are_two_where_the_first_has_no_end(chats: dict[str, ChatTokenizer]) -> None:
    heard = said(
        chats["hermes"], row([WRITE]), f"<tool_call>{_JSON}\n<tool_call>{_JSON}</tool_call>"
    )
    assert heard["calls"] == [CALL, CALL]
    glm = f"<tool_call>write\n{_KEYS[0]}a.py</arg_value>\n{_KEYS[1]}x</arg_value>\n"
    heard = said(chats["glm"], row([WRITE]), f"{glm}{glm}</tool_call>")
    assert heard["calls"] == [CALL, CALL]


@pytest.mark.parametrize(
    "text",
    [
        f"<tool_call>\n<function=write>\n{_CONTENT}",  # `path` is required
        f"<tool_call>\n<function=write>\n{_PATH}<parameter=content>\nx",
        f"<function=other>\n{_PATH}</function>",  # no mark, and no function of that name
        "<function=write> is how a call begins.",
        # The same call begun twice: nothing says which text belongs to which.
        f"{_QWEN}<parameter=path>\na{_QWEN}{_PATH}{_CONTENT}{_QWEN_END}",
    ],
)  # fmt: skip
def test_what_is_in_doubt_is_text(chats: dict[str, ChatTokenizer], text: str) -> None:
    heard = said(chats["qwen"], row([WRITE]), text)
    assert (heard["calls"], heard["text"]) == ([], text)


def test_a_name_that_a_text_mentions_begins_no_argument(chats: dict[str, ChatTokenizer]) -> None:
    """Neither one that is given, nor one that comes later, nor one that is not declared."""
    text = "see <parameter=path>, <parameter=content> and <parameter=x>"
    call = f"{_QWEN}<parameter=path>\n{text}\n</parameter>\n{_CONTENT}{_QWEN_END}"
    heard = said(chats["qwen"], row([WRITE]), call)
    assert heard["calls"] == [("write", {"path": text, "content": "x"})]


def test_arguments_inside_an_argument_of_that_name_are_those_of_the_call(
    chats: dict[str, ChatTokenizer],
) -> None:
    text = (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="write">\n'
        '<｜DSML｜parameter name="arguments" string="false">{"path": "a.py", "content": "x"}'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>"
    )
    assert said(chats["dsml"], row([WRITE]), text)["calls"] == [CALL]


def test_one_call_alone_is_whole_though_more_are_begun(chats: dict[str, ChatTokenizer]) -> None:
    """Nothing is left of the others where one may be."""
    call = f"<tool_call>\n<function=write>\n{_PATH}{_CONTENT}</function>\n</tool_call>\n"
    calling = Calling(functions=[WRITE], parallel=False)
    output = chats["qwen"].answers.output_processor(row(calling=calling))
    ids = chats["qwen"].backend.encode(call * 2, add_special_tokens=False).ids
    parts = []
    said = 0
    while not output.parser.calls:
        parts += output.push(ids[said], None, is_shown_as_text=True)
        said += 1
    assert said < len(ids) - 20
    assert gathered([*parts, *output.finish()])["calls"] == [CALL]


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("hermes", f"Plan. <tool_call>{_JSON}</tool_call>", [CALL]),
        ("hermes", f"Plan. <tool_call>{_JSON}", [CALL]),
        ("hermes", f"Or <tool_call>{_JSON}</tool_call>? <tool_call>{_JSON}</tool_call>", [CALL]),
        ("hermes", f"<tool_call>{_JSON}</tool_call>\n<tool_call>{_JSON}</tool_call>\n", [CALL] * 2),
        ("hermes", f"Draft <tool_call>{_JSON}</tool_call> no.", []),
        ("hermes", "Say <tool_call> now?", []),
        ("kimi", f"Plan. <|tool_calls_section_begin|><|tool_call_begin|>{_KIMI}<|tool_call_end|>"
         "<|tool_calls_section_end|>", [CALL]),
    ],
)  # fmt: skip
def test_a_call_that_a_thought_ends_with_is_a_call(
    chats: dict[str, ChatTokenizer], name: str, text: str, calls: list[Any]
) -> None:
    heard = said(chats[name], row([WRITE], is_thinking=True), text)
    assert heard["calls"] == calls
    assert not heard["text"].strip()
    assert calls or heard["reasoning"] == text


def test_a_thought_waits_for_a_call_no_longer_than_its_limit(tmp_path: Path) -> None:
    """The text it held is given out, and a call at its end still counts as one."""
    chat = family(tmp_path, **HERMES)
    parser = chat.answers.output_processor(row([WRITE], is_thinking=True)).parser
    mark = chat.answers.marks.pattern("<tool_call>")
    assert parser.push(f"{mark} is a mark.") == []
    long = "and so on, " * (ASIDE_SIZE // 10)
    shown = "".join(part.reasoning for part in parser.push(long))
    assert shown == f"<tool_call> is a mark.{long}"
    parts = [*parser.push(f"{mark}{_JSON}"), *parser.flush()]
    assert gathered(parts)["calls"] == [CALL]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "None", "None"),
        ({"type": ["string", "null"]}, "nil", "nil"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["integer", "null"]}, "None", None),
        ({"enum": ["pending", "done"]}, '"pending"', "pending"),
        ({"enum": ["pending", '"pending"']}, '"pending"', '"pending"'),
        ({"enum": ["pending"]}, '"other"', '"other"'),
        ({"anyOf": [{"const": "a"}, {"enum": ["b"]}]}, '"b"', "b"),
        ({"type": "string"}, '"quoted"', '"quoted"'),
    ],
)
def test_words_for_null_and_quotes_are_read_by_the_schema(
    chats: dict[str, ChatTokenizer], schema: dict[str, Any], text: str, value: Any
) -> None:
    function = Function("f", {"type": "object", "properties": {"a": schema}})
    call = f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
    assert said(chats["glm"], row([function]), call)["calls"] == [("f", {"a": value})]


def test_a_mark_that_holds_another_is_one_mark_in_pieces_too(tmp_path: Path) -> None:
    """Command-R's beginning of a call has its end in it."""
    chat = family(tmp_path, tool_parser="command_r")
    call = 'Action: ```json\n[{"tool_name": "write", "parameters": {"path": "a.py"}}]\n```'
    for text in (call, f"Action: ```json{call}"):
        parser = chat.answers.output_processor(row([WRITE])).parser
        whole = gathered([*parser.push(text), *parser.flush()])
        parser = chat.answers.output_processor(row([WRITE])).parser
        pieces = [part for letter in text for part in parser.push(letter)]
        assert gathered([*pieces, *parser.flush()]) | {"ids": []} == whole | {"ids": []}
        assert whole["calls"] == [("write", {"path": "a.py"})]
