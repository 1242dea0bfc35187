"""How byte-level vocabularies cut text into words, by the names that GGUF files have for it.

Names, and which share a rule, are llama.cpp's: src/llama-vocab.cpp, `llama_vocab::impl::load` and
`llm_tokenizer_bpe`. The patterns are those of the models' own tokenizer.json, which llama.cpp
quotes in comments where std::regex cannot express them. Only those that files of the architectures
llama, qwen2 and qwen3 name are here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from tokenizers import Regex, pre_tokenizers


@dataclass(frozen=True, slots=True)
class Splitting:
    """A way of cutting text into words, and what comes with it."""

    # Each cuts what those before it have left, into its matches and what stands between.
    patterns: tuple[str, ...]
    keeps_words: bool = False  # a word that is a token stays whole, whatever the merges say
    adds_bos: bool = False  # a text begins with that token, unless the file says otherwise
    composes: bool = False  # text is brought to NFC first

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """Return what cuts a text and spells its bytes in GPT-2's alphabet."""
        cuts = [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns
        ]
        spelling = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*cuts, spelling])


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _cl100k(digits: str) -> str:
    """Return the pattern that Llama 3 and Qwen2 took over from tiktoken's cl100k_base; they count
    digits differently.
    """
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


# llama.cpp's std::regex knows no \p{Lu}, and takes marks for no letters: for text with combining
# marks, or capitals beyond ASCII within a word, its words differ from the model's own.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_PLAIN = Splitting((_GPT2,))
_DIGITS = Splitting((r"\p{N}", _GPT2))
_LLAMA3 = Splitting((_cl100k(r"\p{N}{1,3}"),), keeps_words=True, adds_bos=True)
_QWEN2 = Splitting((_cl100k(r"\p{N}"),))

SPLITTINGS: Final[Mapping[str, Splitting]] = MappingProxyType(
    {
        # What llama.cpp takes for a file that names none, as those before May 2024 do.
        "default": Splitting((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9]{3}")),
        **dict.fromkeys(("gpt-2", "a.x-4.0", "mellum", "trillion"), _PLAIN),
        **dict.fromkeys(("smollm", "starcoder", "refact", "minerva-7b"), _DIGITS),
        **dict.fromkeys(
            ("llama-bpe", "llama-v3", "llama3", "falcon3", "midm-2.0", "pixtral"), _LLAMA3
        ),
        # Qwen2's tokenizer composes (transformers, models/qwen2/tokenization_qwen2.py), which
        # llama.cpp leaves out.
        "qwen2": Splitting(_QWEN2.patterns, composes=True),
        "deepseek-r1-qwen": _QWEN2,
        "megrez": _QWEN2,
        "tekken": Splitting((_TEKKEN,), keeps_words=True, adds_bos=True),
        "deepseek-coder": Splitting(
            (
                r"[\r\n]",
                r"\s?\p{L}+",
                r"\s?\p{P}+",
                "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
                r"\p{N}",
            )
        ),
    }
)
