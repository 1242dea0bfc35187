"""demo-chat's tokenizer: trained on its own conversations, saved as transformers reads it.

The most frequent words keep the space before them, so that plain text is short. Every other
word is cut apart from its space, so that it has the same tokens wherever it stands: a tiny model
copies tokens, not spellings. Each digit is a token.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from demo import facts
from demo.words import CITIES, PLACE_STARTS

BEGIN, END, PAD, ASSISTANT = "<|begin|>", "<|end|>", "<|pad|>", "<|assistant|>"
CONTEXT = 16384
_SPECIAL = (PAD, BEGIN, END, "<|system|>", "<|tools|>", "<|user|>", ASSISTANT, "<|tool|>")
_FREQUENT = 260
_MARKUP = ("<tool_call>", "</tool_call>")
_TEMPLATE = resources.files("demo").joinpath("template.jinja").read_text("utf-8")


def frequent_words(texts: Iterable[str]) -> list[str]:
    """The words so frequent that they deserve a token with their space; longest first.

    Names of places and kinds of weather stay out: they are there to be copied.
    """
    copied = [*facts.CAPITALS, *facts.CAPITALS.values(), *facts.CONDITIONS, *CITIES, *PLACE_STARTS]
    kept = set(re.findall(r"\w+", " ".join(copied)))
    spaced = re.compile(r" (I|a|[A-Za-z][a-z]+)\b")
    counts = Counter(word for text in texts for word in spaced.findall(text))
    words = [word for word, _ in counts.most_common(_FREQUENT) if word not in kept]
    return sorted(words, key=lambda word: (-len(word), word))


def train_tokenizer(texts: Sequence[str], size: int) -> Tokenizer:
    """Learn a byte-level BPE of at most `size` tokens; every text round-trips."""
    words = "|".join(frequent_words(texts))
    cuts = Regex(rf" (?:{words})(?!\p{{L}})|\p{{L}}+|\p{{N}}|\s|[^\s\p{{L}}\p{{N}}]+")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(cuts, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in _MARKUP])
    return tokenizer


def save_tokenizer(
    tokenizer: Tokenizer,
    folder: Path,
    *,
    special: Sequence[str] = _SPECIAL,
    context: int = CONTEXT,
    template: str = _TEMPLATE,
) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": [t for t in special if t not in (BEGIN, END, PAD)],
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    (folder / "chat_template.jinja").write_text(template, "utf-8")


class Template:
    """The chat template, compiled once: what transformers would render, only sooner."""

    def __init__(self) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        self._template = environment.from_string(_TEMPLATE)

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        """The text of a conversation, without a prompt for what comes next."""
        return self._template.render(messages=messages, tools=tools or None, bos_token=BEGIN)
