"""Equal grammars compile once, however many ask; refusals and slowness are the asker's to hear."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gateway import metrics
from gateway.errors import BadRequest, Overloaded, Unavailable
from gateway.jobs.chat import Grammar
from gateway.serving.generation import grammars
from gateway.serving.generation.grammars import GrammarCache
from gateway.serving.tokenize import ThreadPools
from tests.waiting import until


def regex(source: str) -> Grammar:
    return Grammar("regex", source)


class Compiler:
    """Compiles to the source in capitals; waits while `gate` is closed; refuses two."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.passing: set[str] = set()

    def __call__(self, grammar: Grammar) -> str:
        self.asked.append(grammar.source)
        assert grammar.source in self.passing or self.gate.wait(60)
        if grammar.source == "bad":
            raise BadRequest("no such thing", part="answer_form", code="invalid_grammar")
        if grammar.source == "costly":
            raise TimeoutError
        if grammar.source == "bug":
            raise ZeroDivisionError
        return grammar.source.upper()


Made = tuple[GrammarCache[str], Compiler]
Make = Callable[..., Made]


@pytest.fixture
def make() -> Iterator[Make]:
    """Give a function that makes a grammar cache and the compiler behind it."""
    with ThreadPools() as pool:

        def one(**given: Any) -> Made:
            compiler = Compiler()
            return GrammarCache("m", compiler, pool.compile, **given), compiler

        yield one


async def test_equal_grammars_compile_once_though_who_asked_first_leaves(make: Make) -> None:
    """This holds in flight and afterwards; compilations are counted by outcome."""
    counted = {
        each: metrics.GRAMMARS.labels("m", each)._value for each in ("miss", "joined", "hit")
    }
    before = {outcome: value.get() for outcome, value in counted.items()}
    cache, compiler = make()
    compiler.gate.clear()
    first, *others = (asyncio.create_task(cache.get(regex("a"))) for _ in range(5))
    await until(lambda: compiler.asked)
    first.cancel()
    await asyncio.wait([first])
    compiler.gate.set()
    assert await asyncio.gather(*others) == ["A"] * 4
    assert first.cancelled()
    assert await cache.get(regex("a")) == "A"
    assert compiler.asked == ["a"]
    assert [value.get() - before[outcome] for outcome, value in counted.items()] == [1, 4, 1]
    await cache.get(Grammar("choice", "a"))
    assert compiler.asked == ["a", "a"], "of another kind it is another"


async def test_the_least_recently_used_leaves(make: Make) -> None:
    cache, compiler = make(size=2)
    for source in ("a", "b", "a", "c", "a", "b"):
        await cache.get(regex(source))
    assert compiler.asked == ["a", "b", "c", "b"]
    assert len(cache) == 2


async def test_refusals_are_remembered_for_a_while(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal of a trial that ended by its own clock names the allowed time."""
    cache, compiler = make(timeout_s=7)
    for _ in range(2):
        with pytest.raises(BadRequest, match="no such thing") as caught:
            await cache.get(regex("bad"))
        assert (caught.value.part, caught.value.code) == ("answer_form", "invalid_grammar")
        with pytest.raises(BadRequest, match="7 seconds of processor time"):
            await cache.get(regex("costly"))
    assert compiler.asked == ["bad", "costly"]
    monkeypatch.setattr(grammars, "ERRORS_LAST_S", -1.0)
    with pytest.raises(BadRequest):
        await cache.get(regex("bad"))
    assert compiler.asked == ["bad", "costly", "bad"]


async def test_bugs_are_not_remembered(make: Make) -> None:
    cache, compiler = make()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            await cache.get(regex("bug"))
        await asyncio.sleep(0)
    assert compiler.asked == ["bug", "bug"]


async def test_who_waits_too_long_is_told_to_ask_again(make: Make) -> None:
    """The next request waits for the same compilation, which goes on; so do those behind it."""
    cache, compiler = make(timeout_s=0.02, at_once=1)
    compiler.gate.clear()
    for _ in range(2):
        with pytest.raises(Unavailable) as caught:
            await cache.get(regex("a"))
        assert caught.value.headers["retry-after"] == "2"
    with pytest.raises(Overloaded):
        await cache.get(regex("b"))
    compiler.gate.set()
    assert await cache.get(regex("a")) == "A"
    assert await cache.get(regex("b")) == "B"
    assert compiler.asked == ["a", "b"]


async def test_a_slow_grammar_keeps_no_other(make: Make) -> None:
    cache, compiler = make()
    compiler.gate.clear()
    slow = asyncio.create_task(cache.get(regex("a")))
    await until(lambda: compiler.asked)
    compiler.passing.add("b")
    assert await cache.get(regex("b")) == "B"
    assert not slow.done()
    compiler.gate.set()
    assert await slow == "A"
