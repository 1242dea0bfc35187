"""The model that is nearest to a name, as people type it who come from elsewhere."""

import re
from collections.abc import Callable

import pytest

from gateway.registry import load_catalog, read_short_names, similar_models
from gateway.settings import shipped_models_file

NAMES = [*load_catalog(shipped_models_file(), {}).names(), *read_short_names()]


def colon(name: str) -> str:
    """Spell a name as Ollama does: the family, a colon and the size."""
    return ":".join(name.rsplit("-", 1))


SPELLINGS: dict[str, Callable[[str], str]] = {
    "Qwen3.5-9B": str.title,
    "QWEN3.5-9B": str.upper,
    "gemma-3:4b": colon,
    "gemma3:4b": lambda name: colon(re.sub(r"^([a-z]+)-(\d)", r"\1\2", name)),
    "gemma_3_4b": lambda name: name.replace("-", "_"),
    "gemma 3 4b": lambda name: name.replace("-", " "),
    "qwen3-5-9b": lambda name: name.replace(".", "-"),
    "qwen3.5-9b:latest": lambda name: f"{name}:latest",
    "Qwen3.5-9B-Instruct-4bit": lambda name: f"{name.title()}-Instruct-4bit",
    "gemma-3-4b-it-mlx": lambda name: f"{name}-it-mlx",
    "qwen3..5-9b": lambda name: name.replace(".", ".."),
    "gemma--3-4b": lambda name: name.replace("-", "--", 1),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_short_name_is_the_nearest_to_each_of_its_spellings(spelling: str) -> None:
    spelt = {name: SPELLINGS[spelling](name) for name in read_short_names()}
    assert [
        name for name, typed in spelt.items() if similar_models(typed, NAMES, 3)[0] != name
    ] == []


@pytest.mark.parametrize(
    ("typed", "nearest"),
    [
        ("llama3.2", "llama-3.2-3b"),
        ("llama3.1:8b", "llama-3.2-3b"),
        ("qwen9", "qwen3.5-9b"),
        ("qwne3.5-9b", "qwen3.5-9b"),
        ("gemma4", "gemma-4-e2b"),
        ("qwen3-4b", "qwen3-4b-instruct"),
        ("nomic-embed-text", "nomic-embed-text-v1.5"),
        ("smollm2", "smollm2-135m"),
    ],
)
def test_a_family_names_one_of_it(typed: str, nearest: str) -> None:
    assert similar_models(typed, NAMES, 3)[0] == nearest


@pytest.mark.parametrize(
    "typed", ["mistral:7b", "phi4", "deepseek-r1", "it-4bit", "模型", "-", "x" * 999]
)
def test_no_name_is_near_to_a_family_that_is_not_there(typed: str) -> None:
    assert similar_models(typed, NAMES, 3) == []
