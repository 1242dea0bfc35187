"""Tokenizers whose files would cost minutes or gigabytes are refused before they do."""

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.engine.generation.loading import read_chat_setup
from gateway.engine.prompting.chat_tokenizer import MOST_ADDED, MOST_TOKENS
from gateway.errors import ModelLoadFailed
from tests.checkpoints import write_chat


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_chat(tmp_path, num_hidden_layers=1)


def change(folder: Path, file: str, **keys: Any) -> None:
    whole = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**whole, **keys}))


def test_added_tokens_by_the_hundred_thousand_are_refused(folder: Path) -> None:
    plain = {"special": True, "single_word": False, "lstrip": False, "rstrip": False}
    added = [
        {"id": 1100 + i, "content": f"<{i}>", "normalized": False, **plain}
        for i in range(MOST_ADDED + 1)
    ]
    change(folder, "tokenizer.json", added_tokens=added)
    with pytest.raises(ModelLoadFailed, match=r"tokenizer\.json has over 131,072 added tokens"):
        read_chat_setup(folder, name="mine", max_context=None)


def test_a_token_with_a_far_id_is_refused(folder: Path) -> None:
    """Tables have a place for each id below it."""
    vocabulary = {"a": MOST_TOKENS, "b": 1}
    change(folder, "tokenizer.json", model={"type": "BPE", "vocab": vocabulary, "merges": []})
    with pytest.raises(ModelLoadFailed, match=r"tokenizer\.json has a token with the id 1,048,576"):
        read_chat_setup(folder, name="mine", max_context=None)


def test_a_vocabulary_larger_than_the_weights_is_refused(folder: Path) -> None:
    change(folder, "config.json", vocab_size=10**7)
    with pytest.raises(ModelLoadFailed, match="vocab_size is 10,000,000, and no weights have"):
        read_chat_setup(folder, name="mine", max_context=None)


@pytest.mark.parametrize("ids", ["x", [1, None, "2"], {"a": 1}, -1, [True]])
def test_ends_that_are_no_ids_are_refused_by_name(folder: Path, ids: Any) -> None:
    change(folder, "config.json", eos_token_id=ids)
    with pytest.raises(ModelLoadFailed, match=r"config\.json: eos_token_id is"):
        read_chat_setup(folder, name="mine", max_context=None)
