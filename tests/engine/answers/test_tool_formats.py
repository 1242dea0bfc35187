"""Calls as each family of models writes them: told apart, typed, in whatever pieces they come."""

import json
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx_lm.tool_parsers
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.engine.answers.call_values import read_all
from gateway.engine.answers.harmony import HARMONY_TOKENS
from gateway.engine.answers.output_parts import TOKENS
from gateway.engine.answers.reasoning import REASONING_FORMATS
from gateway.engine.answers.tool_formats import TOOL_FORMATS, infer_tools, tool_format
from gateway.engine.prompting.chat_tokenizer import ChatTokenizer
from gateway.jobs.chat import Calling, Function, Grammar
from gateway.registry.names import REASONING_PARSERS, TOOL_PARSERS, canonical_names
from tests.engine.answers.harness import cut, pushed
from tests.engine.answers.written_calls import FORMS
from tests.engine.chat_formats import family, open_tokenizer, row, said

BOOK = Function(
    "book",
    {
        "type": "object",
        "properties": {
            "seats": {"type": "integer"},
            "vip": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "where": {"$ref": "#/$defs/place"},
            "zip": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "$defs": {"place": {"type": "object", "properties": {"city": {"type": "string"}}}},
    },
)
WHERE = {"city": "Berlin"}
ARGUMENTS = {"seats": 3, "vip": True, "tags": ["a", "b"], "where": WHERE, "zip": "10115"}
JSON = json.dumps(ARGUMENTS)
CALL = f'{{"name": "book", "arguments": {JSON}}}'
PYTHON = """book(seats=3, vip=True, tags=["a", 'b'], where={"city": "Berlin"}, zip="10115")"""


@dataclass(frozen=True)
class Family:
    """The parts of a family's checkpoints, and one call as the family writes it."""

    name: str
    text: str
    tokens: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    words: str = ""
    model_type: str = "llama"


def pairs(form: str, gap: str = "") -> str:
    """Write the arguments with a format of name and value, strings as they are."""
    texts = []
    for name, value in ARGUMENTS.items():
        is_text = isinstance(value, str)
        text = value if is_text else json.dumps(value)
        kind = "string" if is_text else "object"
        texts.append(form.format(name=name, value=text, is_text=str(is_text).lower(), type=kind))
    return gap.join(texts)


_DEEPSEEK = (
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
)  # fmt: skip
_KIMI = (
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>",
)  # fmt: skip
_HARMONY = (
    "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>",
    "<|return|>",
)  # fmt: skip
_XTML = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")

# Sources of the texts: vLLM's tests/tool_parsers/test_*_tool_parser.py by the names of the
# formats, mlx_lm/tool_parsers/*.py's docstrings, and where they have none the templates that are
# named beside.
_PYTHON_MARKS = ("<|python_start|>", "<|python_end|>")
_GEMMA = 'call:book{seats:3,vip:true,tags:["a","b"],where:{city:"Berlin"},zip:"10115"}'
NS = "]<]minimax[>["
M3 = (
    f'{NS}<tool_call>\n{NS}<invoke name="book">{NS}<seats>3{NS}</seats>{NS}<vip>true{NS}</vip>'
    f"{NS}<tags>{NS}<item>a{NS}</item>{NS}<item>b{NS}</item>{NS}</tags>"
    f"{NS}<where>{NS}<city>Berlin{NS}</city>{NS}</where>{NS}<zip>10115{NS}</zip>"
    f"{NS}</invoke>\n{NS}</tool_call>"
)
INTERNLM = f'<|action_start|><|plugin|>\n{{"name": "book", "parameters": {JSON}}}<|action_end|>'
FAMILIES = [
    # Qwen 2.5 and 3, Hermes 2 Pro and 3, Granite 4
    Family("hermes", f"<tool_call>\n{CALL}\n</tool_call>", words="<tool_call> tool_call.name"),
    Family(
        "qwen3_coder",
        "<tool_call>\n<function=book>\n"
        + pairs("<parameter={name}>\n{value}\n</parameter>", "\n")
        + "\n</function>\n</tool_call>",
        words="<tool_call>\n<function=",
    ),
    Family(
        "glm47",
        "<tool_call>book\n"
        + pairs("<arg_key>{name}</arg_key>\n<arg_value>{value}</arg_value>", "\n")
        + "\n</tool_call>",
        words="<arg_key>",
    ),
    Family("mistral", f"[TOOL_CALLS] [{CALL}]", ("[TOOL_CALLS]",), words="[TOOL_CALLS]"),
    Family(  # v11 and later: Small 3.1 and 3.2, Devstral, Ministral 3
        "mistral", f"[TOOL_CALLS]book[CALL_ID]Ab3dE6gh9[ARGS]{JSON}",
        ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"), words="[TOOL_CALLS]",
    ),
    Family(
        "llama3_json", f'{{"name": "book", "parameters": {JSON}}}',
        ("<|python_tag|>",), words="Environment: ipython",
    ),
    Family(
        "llama3_json",
        f'<|python_tag|>{{"type": "function", "name": "book", "parameters": {JSON}}}',
        ("<|python_tag|>",), words="<|python_tag|>",
    ),
    Family("llama4_pythonic", f"[{PYTHON}]", _PYTHON_MARKS, words="<|python_start|>"),
    Family(
        "llama4_pythonic", f"<|python_start|>[{PYTHON}]<|python_end|>",
        _PYTHON_MARKS, words="<|python_start|>",
    ),
    Family(
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>book\n"
        f"```json\n{JSON}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        added=_DEEPSEEK, words="<｜tool▁calls▁begin｜>",
    ),
    Family(  # V3.1
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>book<｜tool▁sep｜>"
        f"{JSON}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        tokens=_DEEPSEEK, words="<｜tool▁calls▁begin｜>",
    ),
    Family(
        "deepseek_v32",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="book">\n'
        + pairs(
            '<｜DSML｜parameter name="{name}" string="{is_text}">{value}</｜DSML｜parameter>', "\n"
        )
        + "\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        words="｜DSML｜",
    ),
    Family(
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="book">\n'
        + pairs('<parameter name="{name}">{value}</parameter>', "\n")
        + "\n</invoke>\n</minimax:tool_call>",
        words="<minimax:tool_call>",
    ),
    Family(
        "gemma4", "<|tool_call>" + _GEMMA.replace('"', '<|"|>') + "<tool_call|>",
        ("<|tool_call>", "<tool_call|>", '<|"|>'), words="<|tool_call> <tool_call|>",
    ),
    Family(
        "functiongemma",
        "<start_function_call>" + _GEMMA.replace('"', "<escape>") + "<end_function_call>",
        ("<start_function_call>", "<end_function_call>", "<escape>"),
        words="<start_function_call>",
    ),
    Family(
        "longcat",
        "<longcat_tool_call>book\n"
        + pairs(
            "<longcat_arg_key>{name}</longcat_arg_key>\n"
            "<longcat_arg_value>{value}</longcat_arg_value>", "\n",
        )
        + "\n</longcat_tool_call>",
        words="<longcat_tool_call>",
    ),
    Family(
        "lfm2", f"<|tool_call_start|>[{PYTHON}]<|tool_call_end|>",
        ("<|tool_call_start|>", "<|tool_call_end|>"), words="<|tool_list_start|>",
    ),
    Family(
        "seed_oss",
        "<seed:tool_call>\n<function=book>\n"
        + pairs("<parameter={name}>{value}</parameter>", "\n")
        + "\n</function>\n</seed:tool_call>",
        added=("<seed:tool_call>", "</seed:tool_call>"), words="<seed:tool_call>",
    ),
    Family(
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.book:0"
        f"<|tool_call_argument_begin|>{JSON}<|tool_call_end|><|tool_calls_section_end|>",
        _KIMI, words="<|tool_calls_section_begin|>",
    ),
    Family(
        "kimi_k3",
        '<|open|>tools<|sep|><|open|>call tool="book" index="1"<|sep|>'
        + pairs(
            '<|open|>argument key="{name}" type="{type}"<|sep|>{value}<|close|>argument<|sep|>'
        )
        + "<|close|>call<|sep|><|close|>tools<|sep|>",
        _XTML,
    ),
    Family(
        "minicpm5",
        '<function name="book">'
        + pairs('<param name="{name}">{value}</param>').replace(">10115<", "><![CDATA[10115]]><")
        + "</function>",
        words='<function name="f"><param name="p">',
    ),
    Family(  # mlx_lm/chat_templates/muse_spark.py, mlx_lm/tool_parsers/muse_spark.py
        "muse_spark",
        " to=self<|message|>Hm.<|eom|><|start|>assistant to=book<|message|>"
        '<atem:function_calls>\n<atem:invoke name="book">\n'
        + pairs('<atem:parameter name="{name}">{value}</atem:parameter>', "\n")
        + "\n</atem:invoke>\n</atem:function_calls>",
        ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>"),
        words="<atem:function_calls>", model_type="muse_spark",
    ),
    Family("nemotron_nano_v2", f"<TOOLCALL>[{CALL}]</TOOLCALL>", words="<TOOLCALL>"),
    Family("hunyuan_a13b", f"<tool_calls>[{CALL}]</tool_calls>", words="<tool_calls>"),
    Family("granite", f"<|tool_call|> [{CALL}]", ("<|tool_call|>",), words="<|tool_call|>"),
    Family("granite", f"<tool_call>[{CALL}]", words="<tool_call>", model_type="granite"),
    Family(
        "phi4_mini_json", f"<|tool_call|>[{CALL}]<|/tool_call|>",
        ("<|tool_call|>", "<|/tool_call|>"), words="<|tool|> <|/tool|>", model_type="phi3",
    ),
    Family("phi4_mini_json", f"functools[{CALL}]", words="<|tool|> <|/tool|>", model_type="phi3"),
    Family(
        "cohere_command3",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "book", '
        f'"parameters": {JSON}}}\n]<|END_ACTION|>',
        ("<|START_ACTION|>", "<|END_ACTION|>"), words="<|START_ACTION|>",
    ),
    Family(  # the tool_use template of CohereForAI/c4ai-command-r-v01
        "command_r",
        f'Action:```json\n[\n    {{"tool_name": "book", "parameters": {JSON}}}\n]```',
        words="Action: ```json directly-answer",
    ),
    Family(  # gpt-oss
        "openai",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary"
        f" to=functions.book <|constrain|>json<|message|>{JSON}<|call|>",
        _HARMONY, model_type="gpt_oss",
    ),
    Family(  # ms-swift's swift/agent_template/minimax_m3.py
        "minimax_m3",
        M3,
        (NS,), ("<tool_call>", "</tool_call>"),
        words=f"set ns_token = '{NS}' set toolcall_begin_token = ns_token ~ '<tool_call>'",
    ),
    Family(  # sglang/srt/function_call/deepseekv41_detector.py
        "deepseek_v41",
        '<｜DSML｜ calls>\n<｜DSML｜ invoke name="book">\n'
        + pairs(
            '<｜DSML｜ parameter name="{name}" string="{is_text}">{value}</｜DSML｜ parameter>',
            "\n",
        )
        + "\n</｜DSML｜ invoke>\n</｜DSML｜ calls>",
        added=("｜DSML｜",), words="<｜DSML｜ calls>",
    ),
    Family(  # vllm/examples/tool_chat_template_muse_glimmer.jinja
        "muse_spark",
        " to=self<|message|>Hm.<|eom|><|start|>assistant to=book.book<|message|>"
        '<atem:function_calls>\n<atem:invoke name="book.book">\n'
        + pairs('<atem:parameter name="{name}">{value}</atem:parameter>', "\n")
        + "\n</atem:invoke>\n</atem:function_calls><|eot|>",
        ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>"),
        words="to=self<|message|> <atem:function_calls>",
    ),
    Family("olmo3", f"<function_calls>\n{PYTHON}\n</function_calls>", words="<function_calls>"),
    Family(
        "apertus", f'<|tools_prefix|>[{{"book": {JSON}}}]<|tools_suffix|>',
        ("<|tools_prefix|>", "<|tools_suffix|>"), words="'<|tools_prefix|>'",
    ),
    Family(
        "internlm", INTERNLM, ("<|action_start|>", "<|plugin|>", "<|action_end|>"),
        words="<|action_start|><|plugin|>",
    ),
]  # fmt: skip
IDS = [f"{each.name}-{i}" for i, each in enumerate(FAMILIES)]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatTokenizer]:
    return {
        name: family(
            tmp_path_factory.mktemp(name),
            tokens=each.tokens,
            added=each.added,
            words=each.words,
            model_type=each.model_type,
        )
        for name, each in zip(IDS, FAMILIES, strict=True)
    }


@pytest.fixture(scope="module", params=zip(IDS, FAMILIES, strict=True), ids=IDS)
def case(
    request: pytest.FixtureRequest, chats: dict[str, ChatTokenizer]
) -> tuple[ChatTokenizer, Family]:
    key, each = request.param
    return chats[key], each


def test_every_format_of_the_table_has_a_text() -> None:
    formats = set(TOOL_FORMATS) - {"none"}
    assert {each.name for each in FAMILIES} == formats
    assert {form.format for form in FORMS.values()} == formats


def test_a_format_is_known_by_its_checkpoint_and_its_calls_typed_by_their_schema(
    case: tuple[ChatTokenizer, Family],
) -> None:
    """An integer, a boolean, an array, an object, and a string that looks like a number."""
    chat, each = case
    assert chat.answers.tools is TOOL_FORMATS[each.name]
    heard = said(chat, row([BOOK]), each.text)
    assert heard["calls"] == [("book", ARGUMENTS)]
    assert heard["text"].strip() == ""


@settings(max_examples=15)
@given(data=st.data())
def test_pieces_may_be_cut_anywhere(
    case: tuple[ChatTokenizer, Family], data: st.DataObject
) -> None:
    chat, each = case
    pieces = []
    for run in filter(None, TOKENS.split(chat.answers.marks.pattern(each.text))):
        is_token = TOKENS.fullmatch(run)
        pieces += cut(run, [] if is_token else data.draw(st.lists(st.integers(0, len(run)))))
    heard = pushed(chat.answers.output_processor(row([BOOK])).parser, pieces)
    assert heard["calls"] == [("book", ARGUMENTS)]


def test_a_call_cut_short_is_never_a_call_but_text(case: tuple[ChatTokenizer, Family]) -> None:
    chat, each = case
    heard = said(chat, row([BOOK]), each.text[: each.text.index("10115")])
    assert heard["calls"] == []
    assert "seats" in heard["text"]


def test_text_before_a_call_streams(case: tuple[ChatTokenizer, Family]) -> None:
    chat, each = case
    if each.name in HEADERS:
        return  # messages of their own: test_harmony.py
    parser = chat.answers.output_processor(row([BOOK])).parser
    assert [part.text for part in parser.push("Let me see")] == ["Let me see"]


# gpt-oss and Muse Spark write a forced call as their answer.
HEADERS = {"openai": "<|channel|>final<|message|>", "muse_spark": " to=user<|message|>"}


def test_a_forced_call_has_the_form_of_our_grammar(case: tuple[ChatTokenizer, Family]) -> None:
    chat, each = case
    text = f'{HEADERS.get(each.name, "")}{{"name":"book","arguments":{JSON}}}'
    calling = Calling(functions=[BOOK], forced=True)
    heard = said(chat, row(calling=calling, grammar=Grammar("calls", "")), text)
    assert heard["calls"] == [("book", ARGUMENTS)]
    assert (heard["text"], heard["reasoning"]) == ("", "")


SEVERAL = {
    "hermes-0": f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>",
    "mistral-4": f"[TOOL_CALLS]book[ARGS]{JSON}[TOOL_CALLS]book[ARGS]{JSON}",
    "llama3_json-5": f"{CALL}; {CALL}",
    "llama4_pythonic-7": f"[{PYTHON}, {PYTHON}]",
    "granite-24": f"<|tool_call|>[{CALL}, {CALL}]",
    "phi4_mini_json-27": f"functools[{CALL}, {CALL}]",
    "minimax_m3-31": M3.replace(f"{NS}</tool_call>", M3.partition("\n")[2]),
    "olmo3-34": f"<function_calls>{PYTHON}\n{PYTHON}</function_calls>",
    "apertus-35": f'<|tools_prefix|>[{{"book": {JSON}}}, {{"book": {JSON}}}]<|tools_suffix|>',
    "internlm-36": INTERNLM * 2,
}


@pytest.mark.parametrize("key", SEVERAL)
def test_parallel_calls_are_several(chats: dict[str, ChatTokenizer], key: str) -> None:
    """Where only one call is allowed, nothing of the others is left, not even as text."""
    for is_parallel, names in ((True, ["book", "book"]), (False, ["book"])):
        calling = Calling(functions=[BOOK], parallel=is_parallel)
        heard = said(chats[key], row(calling=calling), SEVERAL[key])
        assert [call for call, _ in heard["calls"]] == names
        assert len(set(heard["ids"])) == len(names)
        assert not heard["text"].strip()


@pytest.mark.parametrize("text", ['{"name": "Alice", "age": 3}', '["a", "b"]', '{"a": 1}', "[see"])
def test_an_answer_in_json_is_no_bare_call(chats: dict[str, ChatTokenizer], text: str) -> None:
    for key in ("llama3_json-5", "llama4_pythonic-7"):
        heard = said(chats[key], row([BOOK]), text)
        assert (heard["text"], heard["calls"]) == (text, [])


def test_arguments_of_more_than_64_bits_are_kept(chats: dict[str, ChatTokenizer]) -> None:
    text = '<tool_call>{"name": "book", "arguments": {"seats": 123456789012345678901}}</tool_call>'
    heard = said(chats["hermes-0"], row([BOOK]), text)
    assert heard["calls"] == [("book", {"seats": 123456789012345678901})]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "null", "null"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": "string"}, "true", "true"),
        ({"type": "string"}, " two\nlines ", " two\nlines "),
        ({"type": "integer"}, "3.0", 3),
        ({"type": "integer"}, "many", "many"),
        ({"type": "number"}, "2.5", 2.5),
        ({"type": "boolean"}, "True", True),
        ({"type": "array"}, "['a']", ["a"]),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, "7", 7),
        ({}, '{"a": 1}', {"a": 1}),
    ],
)
def test_text_values_mean_what_their_schema_says(
    chats: dict[str, ChatTokenizer], schema: dict[str, Any], text: str, value: Any
) -> None:
    function = Function("f", {"type": "object", "properties": {"a": schema}})
    call = (
        f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
    )
    heard = said(chats["qwen3_coder-1"], row([function]), call)
    assert heard["calls"] == [("f", {"a": value})]


def test_the_names_in_the_registry_are_those_of_the_rows_here() -> None:
    assert set(TOOL_PARSERS) == set(TOOL_FORMATS)
    assert set(REASONING_PARSERS) == set(REASONING_FORMATS)


@pytest.mark.parametrize("parsers", [TOOL_PARSERS, REASONING_PARSERS], ids=["tools", "reasoning"])
def test_a_name_stands_once(parsers: Mapping[str, tuple[str, ...]]) -> None:
    others = sum(len(others) for others in parsers.values())
    assert len(canonical_names(parsers)) == len(parsers) + others


def test_a_format_has_vllms_names_too() -> None:
    aliases = {"granite4": "hermes", "qwen3_xml": "qwen3_coder", "pythonic": "llama4_pythonic"}
    assert {name: tool_format(name).name for name in aliases} == aliases
    with pytest.raises(KeyError):
        tool_format("no such")


def test_every_format_that_mlx_lm_names_is_known_and_its_pythonic_is_lfm2s() -> None:
    names = [module.name for module in pkgutil.iter_modules(mlx_lm.tool_parsers.__path__)]
    inferred = {name: infer_tools((), "<tool_call>", "llama", name) for name in names}
    assert inferred["json_tools"] == "hermes"  # the template's mark comes first, and agrees
    assert inferred["pythonic"] == "lfm2"
    assert [name for name, form in inferred.items() if form == "hermes"] == ["json_tools"]


def test_a_template_without_marks_tells_no_format() -> None:
    assert infer_tools((), "{{ messages }}", "llama", None) is None


def test_internlms_marks_may_have_a_space_between_them() -> None:
    read = tool_format("internlm").read
    for gap in ("", " "):
        text = f'<|action_start|>{gap}<|plugin|>{{"name": "f", "parameters": {{}}}}<|action_end|>'
        assert read_all(read, text, {}) == [{"name": "f", "arguments": {}}]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("set mark = '｜DSML｜' set block = 'tool_calls'", "deepseek_v32"),
        ("set mark = '｜DSML｜' set block = ' calls'", "deepseek_v41"),
        ("<｜DSML｜ calls> <｜DSML｜ invoke name=", "deepseek_v41"),
        ("{% set mark = '｜DSML｜' %}<{{ mark }} calls>", "deepseek_v41"),
        ("{% set mark = '｜DSML｜' %}<{{ mark }}function_calls>", "deepseek_v32"),
        (f"{NS} <tool_call> tool_call.name </think>", "minimax_m3"),
        (f"<minimax:tool_call> {NS}", "minimax_m2"),
        ("<tool_call> tool_call.name <function_calls>", "hermes"),
        ("<atem:function_calls> <|channel|>", "muse_spark"),
        ("<｜DSML｜function_calls> <function_calls>", "deepseek_v32"),
    ],
)
def test_families_that_are_alike_are_told_apart_by_their_own_marks(
    template: str, name: str
) -> None:
    for vocabulary in ((), HARMONY_TOKENS):
        if name == "muse_spark" or not vocabulary:
            assert infer_tools(vocabulary, template, "llama", None) == name


def test_the_table_in_models_yaml_comes_before_what_is_inferred(tmp_path: Path) -> None:
    chat = family(tmp_path, words="[TOOL_CALLS]", tool_parser="hermes")
    assert said(chat, row([BOOK]), f"<tool_call>{CALL}</tool_call>")["calls"]
    chat = family(tmp_path, words="<tool_call>", tool_parser="none")
    assert not chat.answers.reads_calls


def test_a_template_from_models_yaml_tells_the_format(tmp_path: Path) -> None:
    own = "{% if tools %}<tool_call>{{ tool_call.name }}{% endif %}"
    chat = family(tmp_path, words="[TOOL_CALLS]", chat_template=own)
    assert chat.answers.tools is TOOL_FORMATS["hermes"]
    folder = tmp_path / "several"
    assert not family(folder).answers.reads_calls
    config = json.loads((folder / "tokenizer_config.json").read_text())
    templates = {"default": "{{ messages[0].content }}", "tool_use": own}
    config["chat_template"] = [{"name": k, "template": v} for k, v in templates.items()]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").unlink()
    assert open_tokenizer(folder, eos_ids=2).answers.tools is TOOL_FORMATS["hermes"]


@pytest.mark.parametrize("name", [name for name in TOOL_FORMATS if name not in ("none", "openai")])
def test_a_row_reads_what_it_writes(name: str) -> None:
    calls = [{"name": "book", "arguments": ARGUMENTS}] * 2
    form = TOOL_FORMATS[name]
    text = form.write(calls)
    for mark in form.noise:
        text = text.replace(mark, "")
    read = read_all(form.read, text, {"book": BOOK.parameters})
    assert [(call["name"], call["arguments"]) for call in read] == [("book", ARGUMENTS)] * 2
