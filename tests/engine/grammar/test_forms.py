"""The forms that a caller may ask for, and the refusals of the others."""

import re
from pathlib import Path
from typing import Any

import pytest

from gateway.engine.grammar.compiling import compile_grammar
from gateway.engine.grammar.patterns import FORMATS, OWN_FORMATS
from gateway.errors import BadRequest
from gateway.jobs.chat import Grammar
from tests.engine.grammar.drawn_rows import compiled, ids, tokenizer

LIST = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "integer"}}},
    "required": ["a"],
    "additionalProperties": False,
}


def spaced(**options: Any) -> dict[str, Any]:
    return {**LIST, "x-guidance": options}


@pytest.mark.parametrize(
    "options", [{"item_separator": ";"}, {"whitespace_flexible": " ?"}, {"lenient": True}]
)
def test_a_caller_may_ask_for_white_space_alone(options: dict[str, Any]) -> None:
    """All else is a 400 that names the keyword: it might make the answer no JSON."""
    assert compiled(spaced(whitespace_flexible=True)).matcher(ids('{ "a": [1, 2]}')).is_over
    assert compiled(LIST).matcher(ids('{ "a"')).error
    with pytest.raises(BadRequest, match="`x-guidance`") as caught:
        compiled(spaced(**options))
    assert caught.value.code == "invalid_json_schema"


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ('root ::= "a" (', "Expected ')'"),
        ('root ::= "a" y', "y"),
        ('root ::= (?=a) "b"', "'root ::= ('"),
        ("root ::= root", "no answer"),
        ('root ::= "a"{2,1}', "range end must be >= start"),
    ],
)
def test_faults_of_gbnf_grammars_are_not_told_as_larks(source: str, problem: str) -> None:
    """The caller wrote no line of Lark."""
    with pytest.raises(BadRequest) as caught:
        compile_grammar(tokenizer(), Grammar("grammar", source))
    assert caught.value.message.startswith("The GBNF grammar cannot be compiled: ")
    assert problem in caught.value.message
    assert "line 3" not in caught.value.message
    assert caught.value.code == "invalid_grammar"


def test_a_lark_text_with_gbnfs_sign_is_no_gbnf() -> None:
    grammar = compile_grammar(tokenizer(), Grammar("grammar", 'start: "a ::= b"'))
    assert grammar.matcher(ids("a ::= b")).is_over


def test_the_docs_say_which_formats_are_held() -> None:
    """All of them, and no other; a format that is not known is an annotation."""
    docs = Path(__file__).parents[3] / "docs" / "structured-output.md"
    (line,) = re.findall(r"\*\*Formats\*\*: (.*?)\.", docs.read_text(), re.DOTALL)
    assert {*re.findall(r"`([^`]+)`", line)} == {*FORMATS, *OWN_FORMATS}
    for name in (*FORMATS, *OWN_FORMATS):
        assert compiled({"type": "string", "format": name}).matcher(ids('" ')).error
    for name in ("path", "password", "jwt", "uri-reference", "regex", "json-pointer", "int32"):
        unknown = compiled({"type": ["string", "integer"], "format": name}, strict=True)
        assert unknown.matcher(ids('"any thing"')).is_over
