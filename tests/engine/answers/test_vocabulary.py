"""Single tokens as logprobs show them: decoded text and true bytes."""

import itertools
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteFallback, Fuse, Replace, Strip
from tokenizers.decoders import Sequence as Decoders
from tokenizers.models import BPE

from gateway.engine.answers.detokenizer import Vocabulary
from gateway.jobs import Caller, GenerateJob, Sampling
from tests.engine.chat_formats import open_tokenizer

DEMO = Path(__file__).parents[3] / "demo" / "chat" / "tokenizer.json"


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    """Give a byte-level BPE, as Qwen's and Llama's are."""
    return Tokenizer.from_file(str(DEMO))


def sentencepiece() -> Tokenizer:
    """Give a BPE with ▁ for spaces and tokens for single bytes, as Gemma's is."""
    words = ["<unk>", "a", "▁True", "True", "<0xF0>", "<0x9F>", "<0x99>", "<0x82>"]
    tokenizer = Tokenizer(BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>"))
    tokenizer.decoder = Decoders([Replace("▁", " "), ByteFallback(), Fuse(), Strip(" ", 1, 0)])
    return tokenizer


def test_the_texts_of_a_texts_tokens_make_the_text(byte_level: Tokenizer) -> None:
    """Spaces included."""
    vocabulary = Vocabulary(byte_level)
    text = "Hello there, is 12 + 7 True?"
    ids = byte_level.encode(text, add_special_tokens=False).ids
    assert "".join(map(vocabulary.text, ids)) == text
    assert b"".join(map(vocabulary.bytes, ids)) == text.encode()


def test_the_bytes_of_a_split_character_are_its_own(byte_level: Tokenizer) -> None:
    """Though no token of it has a text."""
    vocabulary = Vocabulary(byte_level)
    ids = byte_level.encode("🙂日", add_special_tokens=False).ids
    assert len(ids) > 2
    assert b"".join(map(vocabulary.bytes, ids)) == "🙂日".encode()


def test_sentencepiece_spaces_and_bytes_are_decoded() -> None:
    """With raw pieces a reranker's scores would be inverted in silence."""
    vocabulary = Vocabulary(sentencepiece())
    assert vocabulary.text(2) == " True"
    assert vocabulary.text(3) == "True"
    assert b"".join(map(vocabulary.bytes, [4, 5, 6, 7])) == "🙂".encode()


@pytest.mark.parametrize("way", ["bare", "chat", "continued"])
def test_other_threads_run_while_a_long_prompt_is_encoded(way: str) -> None:
    """The event loop is one of them: a megabyte takes seconds, and nobody may wait as long."""
    chat = open_tokenizer(DEMO.parent, eos_ids=2)
    text = "x" * 400_000
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": text}]
    given: dict[str, dict[str, Any]] = {
        "bare": {"prompt": text},
        "chat": {"messages": [{"role": "user", "content": text}]},
        "continued": {"messages": turns, "continues": True},
    }
    job = GenerateJob(
        caller=Caller(request_id="r", deadline=1e9, allowed_s=1), sampling=Sampling(), **given[way]
    )
    ticks: list[float] = []
    is_over = threading.Event()

    def tick() -> None:
        while not is_over.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    ticking = threading.Thread(target=tick)
    ticking.start()
    started = time.perf_counter()
    chat.prompt(job)
    taken = time.perf_counter() - started
    is_over.set()
    ticking.join()
    longest = max(after - before for before, after in itertools.pairwise(ticks))
    assert longest < max(0.6 * taken, 0.1)
