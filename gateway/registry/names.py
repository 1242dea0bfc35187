"""The names of the formats of tool calls and of thinking, as vLLM and mlx-lm have them.

vLLM's options are `--tool-call-parser` and `--reasoning-parser`, mlx-lm's key is
`tool_parser_type`. The format `none` reads no text as a call or as thinking.
"""

import difflib
import heapq
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

MAX_CHARS = 256  # longest name to compare, since difflib's time is quadratic
MAX_COMPARED = 32  # names to compare, since 1,000 took 130 ms
# The canonical name of each format, with its other names.
TOOL_PARSERS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "apertus": (), "cohere_command3": ("cohere_command4",), "command_r": (),
        "deepseek_v3": ("deepseek_v31",), "deepseek_v32": ("deepseek_v4",), "deepseek_v41": (),
        "functiongemma": ("function_gemma",), "gemma4": (),
        "glm47": ("glm45", "laguna", "poolside_v1"), "granite": (),
        "hermes": ("granite4", "json_tools"), "hunyuan_a13b": (), "internlm": (), "kimi_k2": (),
        "kimi_k3": (), "lfm2": (), "llama3_json": ("llama4_json",),
        "llama4_pythonic": ("pythonic",), "longcat": (), "minicpm5": (), "minimax_m2": (),
        "minimax_m3": (), "mistral": (), "muse_spark": ("muse_glimmer",), "nemotron_nano_v2": (),
        "none": (), "olmo3": (), "openai": (), "phi4_mini_json": (),
        "qwen3_coder": ("mimo", "qwen3_xml", "step3p5"), "seed_oss": (),
    }
)  # fmt: skip
REASONING_PARSERS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "apertus": (), "cohere_command3": ("cohere_command4",), "exaone_deep": (), "gemma4": (),
        "granite": (), "granite_response": (), "hunyuan_a13b": (), "kimi_k3": (), "longcat": (),
        "minimax_m3": (), "mistral": (), "none": (),
        "openai_gptoss": ("muse_glimmer", "muse_spark"),
        "qwen3": (
            "deepseek_r1", "deepseek_v3", "deepseek_v4", "deepseek_v41", "ernie45", "exaone4",
            "glm45", "glm47", "holo2", "kimi_k2", "mimo", "minimax_m2", "nemotron_v3", "olmo3",
            "poolside_v1", "step3", "step3p5",
        ),
        "seed_oss": (), "think_tokens": (),
    }
)  # fmt: skip


def canonical_names(parsers: Mapping[str, tuple[str, ...]]) -> Mapping[str, str]:
    return {each: name for name, others in parsers.items() for each in (name, *others)}


def nearest(name: str, valid: Iterable[str]) -> str | None:
    return next(iter(most_similar(name, valid, 1)), None)


def most_similar(name: str, valid: Iterable[str], most: int) -> list[str]:
    """Return up to `most` similar valid names, the most similar one first."""
    if len(name) > MAX_CHARS:
        return []
    by_folded = {name.casefold(): name for name in valid}
    matcher = difflib.SequenceMatcher(b=name.casefold())

    def shared_letters(folded: str) -> float:
        matcher.set_seq1(folded)
        return matcher.quick_ratio()

    compared = heapq.nlargest(MAX_COMPARED, by_folded, key=shared_letters)
    matches = difflib.get_close_matches(name.casefold(), compared, n=most, cutoff=0.6)
    return [by_folded[match] for match in matches]


# Words of a model's name about the making of its files, which others leave out.
_MAKE = frozenset({"4bit", "8bit", "chat", "dwq", "gguf", "instruct", "it", "latest", "mlx", "qat"})


def similar_models(name: str, valid: Iterable[str], most: int) -> list[str]:
    """Return up to `most` names of models, the nearest first.

    Nearer than similar names are those with all words and numbers of this one, in their order, such
    as qwen3.5-9b for Qwen3.5:9B-4bit or qwen9; of these, those that begin with them.
    """
    wanted, rests = _words(name[:MAX_CHARS]) or [name], {each: iter(_words(each)) for each in valid}
    whole = [each for each, rest in rests.items() if all(word in rest for word in wanted)]
    whole.sort(key=lambda each: (_words(each)[: len(wanted)] != wanted, len("".join(_words(each)))))
    return list(dict.fromkeys([*whole, *most_similar(name, rests, most)]))[:most]


def _words(name: str) -> list[str]:
    return [each for each in re.findall(r"\d+bit|[a-z]+|\d+", name.casefold()) if each not in _MAKE]


def did_you_mean(name: str | None) -> str:
    return f"; did you mean {name!r}?" if name else ""
