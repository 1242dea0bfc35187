"""Ids of calls, in the form that each family's template needs."""

import re
from pathlib import Path
from typing import Any

from gateway.engine.prompting.chat_tokenizer import ChatTokenizer
from gateway.jobs.chat import Calling, Function, GenerateJob, Grammar, Sampling
from tests.checkpoints import write_chat
from tests.engine.chat_formats import family, row, said
from tests.engine.generation.harness import open_engine
from tests.fakes import caller

BOOK = Function("book", {"type": "object"})
CALL = '{"name": "book", "arguments": {}}'
_KIMI = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")


def turns(*ids: str) -> list[dict[str, Any]]:
    """Return a conversation with calls of these ids and their results."""
    call = {"type": "function", "function": {"name": "book", "arguments": {}}}
    return [
        {"role": "user", "content": "Book!"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": i, **call} for i in ids]},
        *({"role": "tool", "content": "ok", "tool_call_id": i} for i in ids),
    ]


SHOWN = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}<{{ c.id }}>{% endfor %}"
    "{% if m.tool_call_id %}[{{ m.tool_call_id }}]{% endif %}{% endfor %}"
)


def shown_ids(chat: ChatTokenizer, *ids: str) -> tuple[list[str], list[str]]:
    """Return the ids of calls and of results as a template is shown them."""
    job = GenerateJob(caller=caller(), messages=turns(*ids), sampling=Sampling())
    text = chat.backend.decode(chat.prompt(job).ids, skip_special_tokens=False)
    return re.findall(r"<([^>]*)>", text), re.findall(r"\[([^\]]*)\]", text)


def test_mistrals_templates_are_shown_ids_of_nine_characters(tmp_path: Path) -> None:
    """They raise for any other; those that a client has from elsewhere are renamed, both alike."""
    chat = family(tmp_path, words="[TOOL_CALLS]", template=SHOWN)
    made = said(chat, row([BOOK]), f"[TOOL_CALLS][{CALL}]")["ids"][0]
    assert re.fullmatch("[A-Za-z0-9]{9}", made)
    calls, results = shown_ids(chat, made, "call_0123456789abcdef")
    assert calls == results
    assert calls[0] == made
    assert all(re.fullmatch("[A-Za-z0-9]{9}", each) for each in calls)
    assert len(set(calls)) == 2


def test_kimis_template_is_shown_its_own_ids(tmp_path: Path) -> None:
    chat = family(tmp_path, tokens=_KIMI, words="<|tool_calls_section_begin|>", template=SHOWN)
    calls, results = shown_ids(chat, "functions.book:0", "call_0123456789abcdef")
    assert calls == results == ["functions.book:0", "functions.book:1"]
    forced = Calling(functions=[BOOK], forced=True)
    job = row(calling=forced, grammar=Grammar("calls", ""), earlier_calls=2)
    assert said(chat, job, '{"name":"book","arguments":{}}')["ids"] == ["functions.book:2"]


def test_other_templates_are_shown_the_clients_ids(tmp_path: Path) -> None:
    chat = family(tmp_path, words="<tool_call>", template=SHOWN)
    assert shown_ids(chat, "any", "other") == (["any", "other"], ["any", "other"])


def test_tools_without_a_known_form_are_told_of(tmp_path: Path) -> None:
    engine = open_engine(write_chat(tmp_path), tool_parser="none")
    for calling, calls_are_text in [
        (None, False),
        (Calling(functions=[BOOK]), True),
        (Calling(functions=[BOOK], forced=True), False),
    ]:
        job = GenerateJob(caller=caller(), messages=turns(), sampling=Sampling(), calling=calling)
        assert engine.prepare(job)[0].calls_are_text is calls_are_text
