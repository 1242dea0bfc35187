"""Calls that are broken or hold text like calls: the parser makes up none."""

from pathlib import Path
from typing import Any

import pytest

from gateway.engine.answers.parsing import Markup, Parser
from gateway.engine.prompting.chat_tokenizer import ChatTokenizer
from gateway.jobs.chat import Function, Grammar
from tests.engine.answers.harness import pushed
from tests.engine.answers.test_marks_left_out import (
    _CONTENT,
    _JSON,
    _KEYS,
    _KIMI,
    _PATH,
    _QWEN,
    _QWEN_END,
    CALL,
    GIVEN,
    WRITE,
)
from tests.engine.chat_formats import family, gathered, row, said

GO = Function("go", {"type": "object", "properties": {}})
K3 = {"tokens": ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"), "tool_parser": "kimi_k3"}


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatTokenizer]:
    given = {**GIVEN, "k3": K3}
    return {name: family(tmp_path_factory.mktemp(name), **each) for name, each in given.items()}


def cut(chat: ChatTokenizer, text: str, **given: Any) -> dict[str, Any]:
    """Say a text that max_tokens ends."""
    output = chat.answers.output_processor(row([WRITE, GO], **given))
    ids = chat.backend.encode(text, add_special_tokens=False).ids
    parts = [part for i in ids for part in output.push(i, None, is_shown_as_text=True)]
    return gathered([*parts, *output.finish(is_cut=True)])


@pytest.mark.parametrize(
    "begun",
    [
        '{"name": "write", "arguments": {"path": "<tool_call>{GO}</tool_call>',
        f"{_JSON}\n" + '{"name": "write", "arguments": {"path": "<tool_call>{GO}</tool_call>',
    ],
)
def test_nothing_inside_a_broken_call_is_a_call(
    chats: dict[str, ChatTokenizer], begun: str
) -> None:
    """A whole one before it is."""
    go = '{"name": "go", "arguments": {}}'
    text = f"<tool_call>{begun.replace('{GO}', go)}"
    heard = said(chats["hermes"], row([WRITE, GO]), text)
    whole = [CALL] if begun.startswith(_JSON) else []
    assert heard["calls"] == whole
    assert heard["text"].endswith(text[-40:])


def test_arguments_that_json_cannot_write_are_text(chats: dict[str, ChatTokenizer]) -> None:
    text = '<tool_call>{"name": "write", "arguments": {"path": NaN}}</tool_call>'
    heard = said(chats["hermes"], row([WRITE]), text)
    assert (heard["calls"], heard["text"]) == ([], text)


def test_a_call_between_tokens_that_is_none_is_shown_with_them(
    chats: dict[str, ChatTokenizer],
) -> None:
    text = "<|tool_call_begin|>no call<|tool_call_end|>"
    heard = said(chats["kimi"], row([WRITE]), text)
    assert (heard["calls"], heard["text"]) == ([], text)


def test_whatever_a_reader_trips_over_is_text() -> None:
    def broken(text: str, at: int, ending: Any) -> None:
        raise RecursionError

    markup = Markup(closes=("</think>",), calls=("<call>",), call_ends=("</call>",), read=broken)
    text = "<call>a</call>b<call>c"
    for is_thinking in (False, True):
        heard = pushed(Parser(markup, "free", is_thinking=is_thinking), [text])
        assert heard["calls"] == []
        assert heard["reasoning" if is_thinking else "text"] == text


def test_a_thought_that_is_cut_or_held_to_a_form_makes_no_call(
    chats: dict[str, ChatTokenizer],
) -> None:
    text = f"Plan. <tool_call>{_JSON}</tool_call>"
    heard = cut(chats["hermes"], text, is_thinking=True)
    assert (heard["calls"], heard["reasoning"]) == ([], text)
    bound = row([WRITE], is_thinking=True, grammar=Grammar("calls", ""))
    heard = said(chats["hermes"], bound, text)
    assert (heard["calls"], heard["reasoning"]) == ([], text)


def test_a_cut_call_that_lacks_what_is_required_is_text(chats: dict[str, ChatTokenizer]) -> None:
    """Its text may have held the marks at which it seems to end."""
    function = f"{_QWEN}{_CONTENT}{_QWEN_END}"
    assert cut(chats["qwen"], function)["calls"] == []
    assert cut(chats["qwen"], f"{_QWEN}{_PATH}{_QWEN_END}")["calls"] == [
        ("write", {"path": "a.py"})
    ]
    assert said(chats["qwen"], row([WRITE]), function)["calls"] == [("write", {"content": "x"})]


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("see <parameter=content> below", "and <parameter=x> too"),
        ("<tool_call>\n<function=f>\n<parameter=x>", "x"),
        ("use <parameter=content>v</parameter> here", None),
    ],
)
def test_what_looks_like_an_argument_inside_a_text_is_text(
    chats: dict[str, ChatTokenizer], path: str, content: str | None
) -> None:
    given = {"path": path} if content is None else {"path": path, "content": content}
    pairs = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in given.items())
    heard = said(chats["qwen"], row([WRITE]), f"{_QWEN}{pairs}{_QWEN_END}")
    assert heard["calls"] == [("write", given)]


@pytest.mark.parametrize(
    "path",
    ["a</parameter>\n</function>\n</tool_call> b", "x</parameter>\n<parameter=path>\ny"],
)
def test_a_text_with_a_second_end_or_its_own_name_again_is_no_call(
    chats: dict[str, ChatTokenizer], path: str
) -> None:
    """Nothing says which of the two is the argument's end, or its value."""
    text = f"{_QWEN}<parameter=path>\n{path}\n</parameter>\n{_QWEN_END}"
    heard = said(chats["qwen"], row([WRITE]), text)
    assert (heard["calls"], heard["text"]) == ([], text)


BODIES = {
    "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "deepseek_v3": ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    "mistral": ("[TOOL_CALLS]", ""),
}


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("lfm2", '[write(path="python -c "print([len("a")])"; rm x")]'),
        ("deepseek_v3", 'write<｜tool▁sep｜>{"path":"ends with "} and more"}'),
        ("mistral", 'write[ARGS]{"path":"ends with "} and more"}'),
    ],
)
def test_a_body_that_seems_to_end_before_its_mark_is_no_call(
    tmp_path: Path, name: str, body: str
) -> None:
    """Quotes inside its text are not escaped."""
    begin, end = BODIES[name]
    chat = family(tmp_path, tool_parser=name)
    heard = said(chat, row([WRITE]), f"{begin}{body}{end}")
    assert (heard["calls"], heard["text"]) == ([], f"{begin}{body}{end}")


GO_CALL = '<tool_call>{"name": "go", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", f"<tool_call>\nwrite:\n<content>{GO_CALL}</content>\n</tool_call>"),
        ("qwen", "<tool_call>\nfunction=write>\n<parameter=content>\n<tool_call>\n<function=go>\n"
         "</function>\n</tool_call>"),
        ("kimi", "<|tool_call_begin|>write file<|tool_call_begin|>functions.go:0"
         "<|tool_call_argument_begin|>{}<|tool_call_end|>"),
    ],
)  # fmt: skip
def test_text_that_is_no_call_has_no_call_inside(
    chats: dict[str, ChatTokenizer], name: str, text: str
) -> None:
    heard = said(chats[name], row([WRITE, GO]), text)
    assert (heard["calls"], heard["text"]) == ([], text)


def test_a_good_call_behind_a_broken_one_is_a_call(chats: dict[str, ChatTokenizer]) -> None:
    broken = "<tool_call>run\n<arg_key>command</arg_key></tool_call>"
    good = f"<tool_call>write\n{_KEYS[0]}a.py</arg_value>\n{_KEYS[1]}x</arg_value>\n</tool_call>"
    heard = said(chats["glm"], row([WRITE]), f"{broken}\n{good}")
    assert heard["calls"] == [CALL]
    assert heard["text"].strip() == broken


@pytest.mark.parametrize("call", ["[TOOL_CALLS] or not?", '[TOOL_CALLS]go[ARGS]{"a": '])
def test_a_thought_that_only_mentions_a_token_goes_on(tmp_path: Path, call: str) -> None:
    tokens = ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]")
    chat = family(tmp_path, tokens=tokens, words="[TOOL_CALLS] [THINK]")
    text = f"Use {call} A secret.[/THINK]Answer"
    heard = said(chat, row([GO], is_thinking=True), text)
    assert (heard["calls"], heard["text"]) == ([], "Answer")
    assert heard["reasoning"].endswith("A secret.")


def test_the_end_of_a_thought_that_a_call_has_ended_is_no_text(
    chats: dict[str, ChatTokenizer],
) -> None:
    text = f"Plan.<|tool_call_begin|>{_KIMI}<|tool_call_end|></think>Done."
    heard = said(chats["kimi"], row([WRITE], is_thinking=True), text)
    assert (heard["calls"], heard["reasoning"], heard["text"]) == ([CALL], "Plan.", "Done.")


def test_a_mark_behind_a_thought_that_mentions_a_call_is_text(
    chats: dict[str, ChatTokenizer],
) -> None:
    text = "Say <tool_call> now?</think>The tag </think> ends it."
    heard = said(chats["hermes"], row([WRITE], is_thinking=True), text)
    assert (heard["reasoning"], heard["text"]) == ("Say <tool_call> now?", text[28:])


def test_a_call_may_lack_the_end_of_its_function(chats: dict[str, ChatTokenizer]) -> None:
    text = f"{_QWEN}{_PATH}{_CONTENT}</tool_call>"
    assert said(chats["qwen"], row([WRITE]), text)["calls"] == [CALL]


def test_a_family_that_says_what_is_text_is_believed(chats: dict[str, ChatTokenizer]) -> None:
    parameter = '<｜DSML｜parameter name="{}" string="{}">42</｜DSML｜parameter>\n'
    pairs = parameter.format("path", "true") + parameter.format("content", "false")
    text = f'<｜DSML｜invoke name="write">\n{pairs}</｜DSML｜invoke>'
    heard = said(chats["dsml"], row([WRITE]), text)
    assert heard["calls"] == [("write", {"path": "42", "content": 42})]


K3_CALL = '<|open|>tools<|sep|><|open|>call tool="write" index="0"<|sep|>'
K3_END = "<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|>"


def test_kimi_k3_may_write_all_arguments_at_once(chats: dict[str, ChatTokenizer]) -> None:
    opening = f'{K3_CALL}<|open|>json type="object"<|sep|>'
    heard = said(chats["k3"], row([WRITE]), f'{opening}{{"path": "a.py", "content": "x"}}{K3_END}')
    assert heard["calls"] == [CALL]
    heard = said(chats["k3"], row([WRITE]), f"{opening}no JSON{K3_END}")
    assert heard["calls"] == []
    assert "no JSON" in heard["text"]


def test_a_blocks_end_mark_that_is_cut_is_no_text(chats: dict[str, ChatTokenizer]) -> None:
    call = f'{K3_CALL}<|open|>argument key="path" type="string"<|sep|>a<|close|>argument<|sep|>'
    for end in ("<|close|>", "<|close|>tools"):
        heard = cut(chats["k3"], f"{call}<|close|>call<|sep|>{end}")
        assert (heard["calls"], heard["text"]) == ([("write", {"path": "a"})], "")


def test_gemma_may_leave_out_the_mark_behind_a_thought(tmp_path: Path) -> None:
    tokens = ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>")
    words = "<|tool_call> <tool_call|> <|channel>thought"
    chat = family(tmp_path, tokens=tokens, words=words)
    text = '<|channel>thought\nHm.\n<channel|>call:write{path:<|"|>a.py<|"|>,content:<|"|>x<|"|>}'
    heard = said(chat, row([WRITE]), text)
    assert (heard["calls"], heard["reasoning"], heard["text"]) == ([CALL], "Hm.\n", "")


def test_words_before_a_bare_call_are_no_mark(chats: dict[str, ChatTokenizer]) -> None:
    text = f"Then functions.write:0 {_KIMI} is what I would send."
    heard = said(chats["hermes"], row([WRITE]), text.replace("<|tool_call_argument_begin|>", ""))
    assert heard["calls"] == []


def test_a_call_that_ends_twice_ends_once(chats: dict[str, ChatTokenizer]) -> None:
    """Nothing of its second end is part of a text."""
    end = f"</parameter>\n{_QWEN_END}"
    heard = said(chats["qwen"], row([WRITE]), f"{_QWEN}<parameter=path>\na.py\n{end}\n{end}")
    assert (heard["calls"], heard["text"]) == ([("write", {"path": "a.py"})], "")


def test_a_cut_text_that_may_go_on_behind_an_end_is_no_call(
    chats: dict[str, ChatTokenizer],
) -> None:
    """Where the model ends the answer itself, the same text is a call with text behind it."""
    text = f"{_QWEN}<parameter=path>\nends: </parameter>\n{_QWEN_END}\nand mo"
    assert cut(chats["qwen"], text)["calls"] == []
    heard = said(chats["qwen"], row([WRITE]), text)
    assert (heard["calls"], heard["text"]) == ([("write", {"path": "ends: "})], "and mo")
    again = f"{_QWEN}{_PATH}{_QWEN_END}\n"
    assert len(cut(chats["qwen"], again * 2)["calls"]) == 2


def test_an_object_around_arguments_that_none_declares_is_one_of_them(
    chats: dict[str, ChatTokenizer],
) -> None:
    function = Function("go", {"type": "object"})
    text = (
        '<tool_call>\n<function=go>\n<parameter=parameters>\n{"path": 1}\n</parameter>\n'
        "</function>\n</tool_call>"
    )
    heard = said(chats["qwen"], row([function]), text)
    assert heard["calls"] == [("go", {"parameters": {"path": 1}})]


def test_marks_around_answers_hold_no_thought_back(tmp_path: Path) -> None:
    chat = family(tmp_path, reasoning_parser="hunyuan_a13b", tool_parser="hunyuan_a13b")
    parser = chat.answers.output_processor(row([WRITE], is_thinking=True)).parser
    parts = parser.push("The mark <answer> comes later, and so on")
    assert "and so on" in "".join(part.reasoning for part in parts)
