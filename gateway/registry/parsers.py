"""The names of the formats in which models write tool calls and thinking; each stands here once.

They are vLLM's (`--tool-call-parser`, `--reasoning-parser`), and mlx-lm's (`tool_parser_type`)
where it has others. With `none` no text is read as a call, or as thinking.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

# A format's canonical name, and its other names.
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
    """Return the canonical name of each name."""
    return {each: name for name, others in parsers.items() for each in (name, *others)}
