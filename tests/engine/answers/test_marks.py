"""Marks are told from text, whatever the text has in it."""

from pathlib import Path

import orjson
import pytest

from gateway.engine.prompting.chat_tokenizer import ChatTokenizer
from gateway.jobs.chat import Calling, Function, Grammar
from tests.engine.chat_formats import family, row, said

NOTE = Function("note", {"type": "object"})
ODD = [
    "\ufffd",
    "a\ufffdb",
    "a\ufdd0b",
    "\ufdd1\ufdd2",
    "\ufdd0x\ufdd2",
    "x\ufdd1\ufdd2y\ufffd",
    "\ufdd3\uffff",
]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder: Path = tmp_path_factory.mktemp("marks")
    return family(
        folder,
        tokens=("<think>", "</think>"),
        added=("<tool_call>", "</tool_call>"),
        words="<think></think><tool_call></tool_call>",
    )


@pytest.mark.parametrize("odd", ODD)
def test_noncharacters_and_replacement_characters_are_text(chat: ChatTokenizer, odd: str) -> None:
    call = orjson.dumps({"name": "note", "arguments": {"text": odd}}).decode()
    heard = said(chat, row([NOTE]), f"<think>{odd}</think>{odd}<tool_call>{call}</tool_call>")
    assert (heard["reasoning"], heard["text"]) == (odd, odd)
    assert heard["calls"] == [("note", {"text": odd})]
    calling = Calling(functions=[NOTE], forced=True)
    forced = row(calling=calling, grammar=Grammar("calls", ""))
    assert said(chat, forced, call)["calls"] == [("note", {"text": odd})]


def test_a_call_that_cannot_be_read_is_shown_to_the_letter(chat: ChatTokenizer) -> None:
    text = "<tool_call>\ufdd0\ufffd</tool_call>"
    assert said(chat, row([NOTE]), text)["text"] == text


def test_the_logprobs_of_such_a_text_have_its_bytes(chat: ChatTokenizer) -> None:
    ids = chat.backend.encode("".join(ODD), add_special_tokens=False).ids
    assert b"".join(map(chat.vocabulary.bytes, ids)) == "".join(ODD).encode()
