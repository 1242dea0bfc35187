"""The cost of the parts of a tokenizer.json is bounded before a text meets them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.engine.device import Device
from gateway.engine.embedding.loading import load_embedding_in_steps
from gateway.engine.generation.loading import read_chat_setup
from gateway.engine.tokenizer_parts import check_growth, has_patterns
from gateway.errors import ModelLoadFailed
from tests.checkpoints import write_chat
from tests.engine.embedding.harness import tiny
from tests.spoilt_tokenizers import spoilt

BYTES = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}


def replace(content: str, pattern: str = "q") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def both(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(steps)}


@pytest.mark.parametrize(
    "normalizer",
    [
        both(*[replace("qq")] * 24),
        both(both(*[replace("qq")] * 4), both(*[replace("qq")] * 4)),
        replace("z" * 1000),
        replace("z" * 100, ""),
        {"type": "Replace", "pattern": {"Regex": "x{0,9}"}, "content": "y" * 65},
        {"type": "Prepend", "prepend": "x" * 1000},
    ],
)
def test_a_normalizer_that_makes_texts_far_longer_is_refused(normalizer: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="its normalizer makes texts up to"):
        check_growth(spoilt(normalizer=normalizer))


def test_a_decoder_that_makes_texts_far_longer_is_refused() -> None:
    """A token would hold the lane for minutes."""
    steps = {"type": "Sequence", "decoders": [replace("qq")] * 26}
    with pytest.raises(ValueError, match="its decoder makes texts up to"):
        check_growth(spoilt(decoder=steps))


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"normalizer": {"type": "NFC"}}, False),
        ({"normalizer": {"type": "Prepend", "prepend": "▁"}}, False),
        ({"normalizer": both({"type": "Lowercase"}, replace("▁", " "))}, True),
        ({"pre_tokenizer": {"type": "Whitespace"}}, False),
        ({"pre_tokenizer": {**BYTES, "add_prefix_space": False}}, False),
        ({}, False),
    ],
)
def test_usual_parts_grow_little_and_their_patterns_are_known(
    parts: dict[str, Any], expected: bool
) -> None:
    tokenizer = spoilt(**parts)
    check_growth(tokenizer)
    assert has_patterns(tokenizer) is expected


def chat(folder: Path) -> Path:
    return write_chat(folder / "chat", num_hidden_layers=1)


def embedding(folder: Path) -> Path:
    return tiny(folder, "bert")


def load(folder: Path) -> None:
    if folder.name == "chat":
        read_chat_setup(folder, name="mine", max_context=None)
    else:
        for _ in load_embedding_in_steps(folder, name="mine", device=Device.CPU):
            pass


@pytest.mark.parametrize("write", [chat, embedding])
def test_a_model_whose_texts_grow_is_refused_at_its_load(
    write: Callable[[Path], Path], tmp_path: Path
) -> None:
    folder = write(tmp_path)
    file = folder / "tokenizer.json"
    whole = {**json.loads(file.read_text()), "normalizer": both(*[replace("qq")] * 24)}
    file.write_text(json.dumps(whole))
    with pytest.raises(ModelLoadFailed, match=r"tokenizer\.json cannot be used: its normalizer"):
        load(folder)
