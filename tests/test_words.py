"""The words of comments and docstrings: each reads alone.

A comment that begins with a preposition, a relative or a conjunction is the end of a sentence whose
beginning is somewhere else: a reader has to find it first.
"""

import ast
import io
import re
import tokenize
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final

import pytest

ROOT = Path(__file__).parents[1]
RELATIVES: Final = re.compile(r"of|that|which|who|whom|whose|where")
LINKS: Final = re.compile(
    r"after|and|as|at|because|before|beside|beyond|but|by|down|for|from|if|in|into|on|or|out|over"
    r"|since|so|than|though|through|to|under|unless|until|up|when|while|with|within|without"
    rf"|{RELATIVES.pattern}"
)
# Instructions to tools, not words for readers.
TOOLS: Final = ("#!", "# noqa", "# type:", "# fmt")
# Starlette has 9.3 % and httpcore 10.2 %.
MOST_LINKS: Final = 0.1
MOST_WHAT: Final = 25  # in 10,000 lines
ROOMS: Final = ("gateway", "tests", "benchmarks", "compat_tests")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Words:
    """The comments of a folder, by their first words, and all of its prose."""

    openers: dict[str, str] = field(default_factory=dict)  # first words, by the comment's place
    prose: list[str] = field(default_factory=list)  # comments and docstrings, in lower case
    lines: int = 0

    def beginning_with(self, words: re.Pattern[str]) -> list[str]:
        return [place for place, opener in self.openers.items() if words.fullmatch(opener)]

    def count(self, pattern: str) -> int:
        return sum(len(re.findall(pattern, text)) for text in self.prose)


def read(text: str, name: str) -> Words:
    """Read the words of one file. A block of comment lines counts as one comment."""
    words, last = Words(lines=text.count("\n")), -2
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT or token.string.startswith(TOOLS):
            continue
        row, is_alone = token.start[0], token.line.strip().startswith("#")
        found = re.search(r"[a-z']+", token.string.lower())
        if found is not None and not (is_alone and last == row - 1):
            words.openers[f"{name}:{row}: {token.string}"] = found[0]
        last = row if is_alone else -2
        words.prose.append(token.string.lower())
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, DOCUMENTED)]
    words.prose += [(ast.get_docstring(node) or "").lower() for node in nodes]
    return words


@cache
def words_of(room: str) -> Words:
    whole = Words()
    for file in sorted((ROOT / room).rglob("*.py")):
        words = read(file.read_text(encoding="utf-8"), str(file.relative_to(ROOT)))
        whole.openers.update(words.openers)
        whole.prose += words.prose
        whole.lines += words.lines
    return whole


@pytest.mark.parametrize("room", ROOMS)
def test_no_comment_begins_with_a_relative(room: str) -> None:
    assert words_of(room).beginning_with(RELATIVES) == []


@pytest.mark.parametrize("room", ROOMS)
def test_few_comments_begin_in_the_middle_of_a_sentence(room: str) -> None:
    words = words_of(room)
    found = words.beginning_with(LINKS)
    assert len(found) <= MOST_LINKS * len(words.openers), "\n".join(found)


def test_nouns_stand_where_what_would() -> None:
    words = words_of("gateway")
    assert words.count(r"\bwhat\b") <= MOST_WHAT * words.lines / 10_000
    assert words.count(r"\bso many\b") == 0


@pytest.mark.parametrize(
    ("text", "opener"),
    [
        ("LIMIT = 2  # of a body", "of"),
        ("# A body's bytes.\n# of two lines", "a"),
        ("# Bytes.\nLIMIT = 2\n# If none, all.", "bytes"),
        ("x = 1  # noqa: E741", None),
        ('x = "# of a string"', None),
    ],
)
def test_a_block_of_comments_counts_by_its_first_word(text: str, opener: str | None) -> None:
    openers = list(read(f"{text}\n", "file.py").openers.values())
    assert openers[:1] == ([] if opener is None else [opener])
