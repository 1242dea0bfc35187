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
    with pytest.raises(ModelLoadFailed, match="vocab_size is 10,000,000, but no weight has"):
        read_chat_setup(folder, name="mine", max_context=None)


@pytest.mark.parametrize("ids", ["x", [1, None, "2"], {"a": 1}, -1, [True]])
def test_ends_that_are_no_ids_are_refused_by_name(folder: Path, ids: Any) -> None:
    change(folder, "config.json", eos_token_id=ids)
    with pytest.raises(ModelLoadFailed, match=r"config\.json: eos_token_id isn't a token id"):
        read_chat_setup(folder, name="mine", max_context=None)


def add_tokens(folder: Path, *names: str) -> None:
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    for i, name in enumerate(names):
        added.append({"id": 1026 + i, "content": name, "special": True, **plain})
    change(folder, "tokenizer.json", added_tokens=added)


def ends_of(folder: Path) -> list[str]:
    chat = read_chat_setup(folder, name="mine", max_context=None).chat
    return chat.pieces(sorted(chat.answers.eos_ids))


@pytest.mark.parametrize(
    "name", ["<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end_of_text|>", "<end_of_turn>"]
)
def test_a_token_that_ends_answers_by_its_name_does_where_all_files_name_another(
    folder: Path, name: str
) -> None:
    """The same checkpoint as a GGUF file has the same ends."""
    change(folder, "config.json", eos_token_id=0)
    change(folder, "tokenizer_config.json", eos_token="<|pad|>")
    add_tokens(folder, name)
    assert ends_of(folder) == ["<|pad|>", "<|end|>", name]


@pytest.mark.parametrize("beside", [("<|return|>", "<|call|>"), ("<|flush|>", "<|calls|>")])
def test_the_end_of_a_message_that_others_follow_is_no_end(
    folder: Path, beside: tuple[str, str]
) -> None:
    """Solar Open's thoughts end with it, and its answer comes after them; likewise gpt-oss's."""
    change(folder, "config.json", eos_token_id=1026)
    change(folder, "tokenizer_config.json", eos_token=beside[0])
    add_tokens(folder, *beside)
    assert ends_of(folder) == [beside[0]]


def test_a_name_that_is_no_token_of_its_own_ends_nothing(folder: Path) -> None:
    whole = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = {**whole["model"]["vocab"], "<|im_end|>": 1026}
    change(folder, "tokenizer.json", model={**whole["model"], "vocab": vocabulary})
    assert ends_of(folder) == ["<|end|>"]
