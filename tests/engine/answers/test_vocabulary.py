"""Single tokens as logprobs show them: decoded text and true bytes."""

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
    return Tokenizer.from_file(str(DEMO))


def sentencepiece() -> Tokenizer:
    """Give a BPE with ▁ for spaces and tokens for single bytes, as Gemma's is."""
    words = ["<unk>", "a", "▁True", "True", "<0xF0>", "<0x9F>", "<0x99>", "<0x82>"]
    tokenizer = Tokenizer(BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>"))
    tokenizer.decoder = Decoders([Replace("▁", " "), ByteFallback(), Fuse(), Strip(" ", 1, 0)])
    return tokenizer


def test_the_texts_of_a_texts_tokens_make_the_text(byte_level: Tokenizer) -> None:
    vocabulary = Vocabulary(byte_level)
    text = "Hello there, is 12 + 7 True?"
    ids = byte_level.encode(text, add_special_tokens=False).ids
    assert "".join(map(vocabulary.text, ids)) == text
    assert b"".join(map(vocabulary.bytes, ids)) == text.encode()


def test_the_bytes_of_a_split_character_are_its_own(byte_level: Tokenizer) -> None:
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


class Batched:
    """A tokenizer that refuses the calls which keep the GIL: tokenizers' batch calls release it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, *_: Any, **__: Any) -> None:
        pytest.fail("the event loop waits for it: a megabyte takes seconds")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@pytest.mark.parametrize(
    "given",
    [
        {"prompt": "hello"},
        {"messages": [{"role": "user", "content": "hi"}]},
        {"messages": [{"role": "assistant", "content": "hi"}], "continues": True},
    ],
)
def test_other_threads_run_while_a_prompt_is_encoded(given: dict[str, Any]) -> None:
    chat = open_tokenizer(DEMO.parent, eos_ids=2)
    backend: Any = Batched(chat.backend)
    chat.backend = chat.controls._tokenizer = backend
    caller = Caller(request_id="r", deadline=1e9, allowed_s=1)
    assert chat.prompt(GenerateJob(caller=caller, sampling=Sampling(), **given)).ids
