"""Equal grammars compile once, however many ask; refusals and slowness are the asker's to hear."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from gateway import metrics
from gateway.errors import BadRequest, Overloaded, Unavailable
from gateway.jobs import Grammar
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
        assert grammar.source in self.passing or self.gate.wait(10)
        if grammar.source == "bad":
            raise BadRequest("no such thing", part="answer_form", code="invalid_grammar")
        if grammar.source == "costly":
            raise TimeoutError
        if grammar.source == "bug":
            raise ZeroDivisionError
        return grammar.source.upper()


@pytest.fixture
def compiler() -> Compiler:
    return Compiler()


@pytest.fixture
def pool() -> Iterator[ThreadPools]:
    with ThreadPools() as pool:
        yield pool


async def test_equal_grammars_compile_once(compiler: Compiler, pool: ThreadPools) -> None:
    """In flight or afterwards; counted by outcome."""
    cache = GrammarCache("once", compiler, pool.run)
    compiler.gate.clear()
    waiting = [asyncio.create_task(cache.get(regex("a"))) for _ in range(5)]
    await until(lambda: compiler.asked)
    compiler.gate.set()
    assert await asyncio.gather(*waiting) == ["A"] * 5
    assert await cache.get(regex("a")) == "A"
    assert compiler.asked == ["a"]
    counted = {
        outcome: metrics.GRAMMARS.labels("once", outcome)._value.get()
        for outcome in ("miss", "joined", "hit")
    }
    assert counted == {"miss": 1, "joined": 4, "hit": 1}


async def test_kinds_are_not_mixed_up(compiler: Compiler, pool: ThreadPools) -> None:
    """The same text as a regex and as a choice is two grammars."""
    cache = GrammarCache("kinds", compiler, pool.run)
    await cache.get(regex("a"))
    await cache.get(Grammar("choice", "a"))
    assert compiler.asked == ["a", "a"]


async def test_one_who_leaves_does_not_stop_the_others(
    compiler: Compiler, pool: ThreadPools
) -> None:
    """Not even the one who asked first."""
    cache = GrammarCache("leaving", compiler, pool.run)
    compiler.gate.clear()
    first, second = (asyncio.create_task(cache.get(regex("a"))) for _ in range(2))
    await until(lambda: compiler.asked)
    first.cancel()
    await asyncio.wait([first])
    compiler.gate.set()
    assert await second == "A"
    assert first.cancelled()
    assert compiler.asked == ["a"]


async def test_the_least_recently_used_leaves(compiler: Compiler, pool: ThreadPools) -> None:
    """The cache is bounded."""
    cache = GrammarCache("bounded", compiler, pool.run, size=2)
    for source in ("a", "b", "a", "c", "a", "b"):
        await cache.get(regex(source))
    assert compiler.asked == ["a", "b", "c", "b"]
    assert len(cache) == 2


async def test_refusals_are_remembered_for_a_while(
    compiler: Compiler, pool: ThreadPools, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each asker hears it; wire gives it the field of their own request."""
    cache = GrammarCache("refusing", compiler, pool.run)
    for _ in range(2):
        with pytest.raises(BadRequest, match="no such thing") as caught:
            await cache.get(regex("bad"))
        assert (caught.value.part, caught.value.code) == ("answer_form", "invalid_grammar")
    assert compiler.asked == ["bad"]
    monkeypatch.setattr(grammars, "ERRORS_LAST_S", -1.0)
    with pytest.raises(BadRequest):
        await cache.get(regex("bad"))
    assert compiler.asked == ["bad", "bad"]


async def test_bugs_are_not_remembered(compiler: Compiler, pool: ThreadPools) -> None:
    """What is not the grammar's fault is tried again."""
    cache = GrammarCache("bugs", compiler, pool.run)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            await cache.get(regex("bug"))
        await asyncio.sleep(0)
    assert compiler.asked == ["bug", "bug"]


async def test_who_waits_too_long_is_told_to_ask_again(
    compiler: Compiler, pool: ThreadPools
) -> None:
    """And then waits for the same compilation, which goes on; so is who waits behind it."""
    cache = GrammarCache("slow", compiler, pool.run, timeout_s=0.1, at_once=1)
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


async def test_what_costs_too_much_is_refused_for_a_while(
    compiler: Compiler, pool: ThreadPools
) -> None:
    """A trial that ended by its own clock is the grammar's fault, and says how much was allowed."""
    cache = GrammarCache("costly", compiler, pool.run, timeout_s=7)
    for _ in range(2):
        with pytest.raises(BadRequest, match="7 seconds of processor time"):
            await cache.get(regex("costly"))
    assert compiler.asked == ["costly"]


async def test_a_slow_grammar_keeps_no_other(compiler: Compiler, pool: ThreadPools) -> None:
    """Another is compiled beside it."""
    cache = GrammarCache("beside", compiler, pool.compile)
    compiler.gate.clear()
    slow = asyncio.create_task(cache.get(regex("a")))
    await until(lambda: compiler.asked)
    compiler.passing.add("b")
    assert await cache.get(regex("b")) == "B"
    assert not slow.done()
    compiler.gate.set()
    assert await slow == "A"
