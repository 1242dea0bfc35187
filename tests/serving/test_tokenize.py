"""Requests that wait for tokens: they take turns, and long ones hold up no short one."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from gateway.serving.tokenize import LONG_CHARS, SLICE_CHARS, ThreadPools, prompt_kind, tokenize
from tests.fakes import generate_job
from tests.waiting import until

pytestmark = pytest.mark.anyio


class Encoder:
    """Encodes a text as its length, once `gate` is open; keeps the lengths of each call."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.calls: list[list[int]] = []

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        self.calls.append([len(text) for text in texts])
        assert self.gate.wait(60)
        if any("bad" in text for text in texts):
            raise ValueError("bad")
        return [[len(text)] for text in texts]


@pytest.fixture
async def pool() -> AsyncIterator[ThreadPools]:
    with ThreadPools() as pool:
        yield pool


def texts(chars: int, count: int) -> list[str]:
    return ["x" * chars] * count


async def test_each_text_has_its_row(pool: ThreadPools) -> None:
    asked = ["x" * (n * 997 % 60_000) for n in range(100)]
    encoder = Encoder()
    assert await tokenize(encoder, asked, pool) == [[len(text)] for text in asked]
    assert len(encoder.calls) > 10
    assert max(map(sum, encoder.calls)) <= SLICE_CHARS


async def test_a_short_request_passes_a_long_one(pool: ThreadPools) -> None:
    encoder = Encoder()
    encoder.gate.clear()
    long = asyncio.create_task(tokenize(encoder, texts(LONG_CHARS, 100), pool))
    await until(lambda: encoder.calls)
    encoder.gate.set()
    assert await tokenize(encoder, texts(2000, 2), pool) == [[2000], [2000]]
    assert not long.done()
    assert await long == [[LONG_CHARS]] * 100


async def test_long_requests_take_turns(pool: ThreadPools) -> None:
    """The one that came later and is smaller is answered first."""
    encoder = Encoder()
    ended: list[str] = []

    async def ask(name: str, count: int) -> None:
        await tokenize(encoder, texts(SLICE_CHARS, count), pool)
        ended.append(name)

    await asyncio.gather(ask("first", 40), ask("second", 3), ask("third", 20))
    assert ended == ["second", "third", "first"]
    assert max(map(sum, encoder.calls)) <= SLICE_CHARS


async def test_what_nobody_waits_for_is_not_encoded(pool: ThreadPools) -> None:
    encoder = Encoder()
    encoder.gate.clear()
    left = asyncio.create_task(tokenize(encoder, texts(SLICE_CHARS, 50), pool))
    await until(lambda: encoder.calls)
    left.cancel()
    stays = asyncio.create_task(tokenize(encoder, texts(SLICE_CHARS, 2), pool))
    await asyncio.sleep(0)
    encoder.gate.set()
    assert await stays == [[SLICE_CHARS]] * 2
    assert len(encoder.calls) == 3


async def test_long_prompts_and_grammars_keep_no_short_prompt(pool: ThreadPools) -> None:
    gate = threading.Event()
    others: list[asyncio.Future[Any]] = [
        *(asyncio.ensure_future(pool.run(gate.wait, 10, kind="long prompts")) for _ in range(9)),
        *(asyncio.ensure_future(pool.run(gate.wait, 10, kind="long texts")) for _ in range(9)),
        *(asyncio.ensure_future(pool.compile(gate.wait, 10)) for _ in range(9)),
    ]
    await asyncio.sleep(0)  # all are handed over
    assert await pool.run(len, "short") == 5
    assert not any(each.done() for each in others)
    gate.set()
    await asyncio.gather(*others)


def test_a_prompt_is_long_by_all_that_it_holds() -> None:
    half = "x" * (LONG_CHARS // 2)
    assert prompt_kind(generate_job(half)) == "short prompts"
    assert prompt_kind(generate_job(half * 3)) == "long prompts"
    call = {"function": {"name": "f", "arguments": {"a": [half, {"b": half}]}}}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert prompt_kind(replace(generate_job(""), messages=[called])) == "long prompts"
    tool = {"type": "function", "function": {"name": "f", "description": half * 2}}
    assert prompt_kind(replace(generate_job(""), tools=[tool, tool])) == "long prompts"
    many = {"type": "function", "function": {"name": "f", "parameters": {"enum": [1] * LONG_CHARS}}}
    assert prompt_kind(replace(generate_job(""), tools=[many])) == "long prompts"
    assert prompt_kind(replace(generate_job(""), prompt=[1] * LONG_CHARS)) == "short prompts"


async def test_a_text_that_patterns_are_tried_on_is_never_read_on_the_loop() -> None:
    """A pattern of the model's files may take minutes; the loop belongs to all."""
    threads = []

    def encode(texts: Sequence[str]) -> list[list[int]]:
        threads.append(threading.current_thread())
        return [[len(text)] for text in texts]

    with ThreadPools() as pool:
        assert await tokenize(encode, ["short"], pool) == [[5]]
        assert await tokenize(encode, ["short"], pool, has_patterns=True) == [[5]]
    assert threads[0] is threading.current_thread()
    assert threads[1] is not threading.current_thread()


async def test_a_tokenizer_that_never_ends_keeps_no_other_models_texts_waiting() -> None:
    gate = threading.Event()
    with ThreadPools() as pool, ThreadPools(pool) as stuck, ThreadPools(pool) as other:
        waiting = [asyncio.create_task(stuck.run(gate.wait)) for _ in range(9)]
        async with asyncio.timeout(60):
            assert await other.run(int, "3") == 3
            assert await pool.run(int, "4") == 4
            assert await stuck.compile(int, "5") == 5  # all models share this thread
        gate.set()
        await asyncio.gather(*waiting)
        assert await pool.run(int, "6") == 6


async def test_readings_that_never_end_keep_no_other_model_and_no_check_waiting() -> None:
    gate = threading.Event()
    with ThreadPools() as pool, ThreadPools(pool) as stuck, ThreadPools(pool) as other:
        run = asyncio.create_task(stuck.run(gate.wait, kind="readings"))
        next_run = asyncio.create_task(stuck.run(gate.is_set, kind="readings"))
        async with asyncio.timeout(60):
            assert await other.run(int, "3", kind="readings") == 3
            assert await stuck.run(int, "4", kind="checks") == 4
        gate.set()
        assert await run
        assert await next_run  # a model's readings run one after another
