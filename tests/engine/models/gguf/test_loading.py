"""A chat model from a GGUF file alone: its tokenizer, template, ends and sampling are in it."""

from pathlib import Path
from typing import Any

import pytest

from gateway.engine.device import Device
from gateway.engine.generation.loading import read_chat_setup
from gateway.engine.generation.prepare import ChatSetup
from gateway.engine.generation.self_test import self_test_digest
from gateway.engine.models.decoders import Numbers
from gateway.engine.models.gguf.checkpoint import GgufCheckpoint
from gateway.errors import ModelLoadFailed
from tests.engine.generation.harness import job
from tests.gguf_files import CONTEXT, Stored, describe, vocabulary, weigh, write_gguf, write_model


def read(path: Path, **given: Any) -> ChatSetup:
    whole = {"max_context": None, **given}
    return read_chat_setup(path, name="mine", **whole)


def test_the_setup_is_what_the_file_says(tmp_path: Path) -> None:
    found = read(write_model(tmp_path / "a.gguf"))
    prompt = found.chat.tokenizer.decode(found.chat.prompt(job("Hi")).ids)
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert found.chat.answers.eos_ids == {0, 2}  # <|endoftext|> ends answers too
    assert (found.max_context, found.vocab_size) == (CONTEXT, 263)


def test_how_its_makers_sample_is_its_default(tmp_path: Path) -> None:
    said = {"temp": 0.5, "top_k": 20, "top_p": 0.75, "min_p": 2.0, "penalty_repeat": 1.5}
    named = {f"general.sampling.{key}": value for key, value in said.items()}
    path = write_model(tmp_path / "a.gguf", "llama", 0, **named)
    assert read(path).sampling_defaults == {
        "temperature": 0.5,
        "top_k": 20,
        "top_p": 0.75,
        "repetition_penalty": 1.5,
    }


def test_more_tokens_than_embeddings_are_refused(tmp_path: Path) -> None:
    """Their states would be read from beyond the array's end."""
    tokens = [*vocabulary()["tokenizer.ggml.tokens"], "onemore"]
    types = [*vocabulary()["tokenizer.ggml.token_type"], *vocabulary()["tokenizer.ggml.token_type"]]
    changed = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types[: len(tokens)]}
    path = write_gguf(tmp_path / "a.gguf", describe("llama", **changed), weigh("llama"))
    with pytest.raises(ModelLoadFailed, match="264 tokens, but only 263 embeddings"):
        read(path)


def test_a_tokenizer_that_is_not_known_is_named(tmp_path: Path) -> None:
    path = write_model(tmp_path / "a.gguf", "llama", 0, **{"tokenizer.ggml.model": "t5"})
    with pytest.raises(ModelLoadFailed, match=r"a\.gguf: .*t5") as caught:
        read(path)
    assert "ValueError" not in str(caught.value)


def test_the_self_test_depends_on_the_numbers_formats(tmp_path: Path) -> None:

    def digest(name: str, seed: int, *, is_packed: bool = False, **kinds: str) -> str:
        tensors: dict[str, Stored] = weigh("qwen3", seed, **kinds)
        path = write_gguf(tmp_path / name, describe("qwen3"), tensors)
        checkpoint = GgufCheckpoint("mine", path)
        return self_test_digest(checkpoint, Device.CPU, Numbers(is_packed=is_packed))

    one = digest("a.gguf", 0)
    assert digest("b.gguf", 1) == one
    assert digest("a.gguf", 0, ffn_up="Q4_0") != one
    assert digest("a.gguf", 0, is_packed=True) != one
