"""Checkpoints that mean ill: a sound one, with a fault in one of its files.

The faults are in its config, its tokenizer, its weights or its template.
"""

import json
import shutil
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from hypothesis import strategies as st

Spoil: TypeAlias = Callable[[Path], None]

NUMBERS: list[Any] = [
    *(-1, 0, 1, 2, 3, 7, -5, -(10**9), 10**6, 10**9, 2**31, 2**32 - 1, 2**63, 10**30, 0.5, -0.0),
    *(1e308, float("nan"), float("inf"), None, True, "", "32", "x", [], [1, 2], {}, {"a": 1}),
]
KEYS = [
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps"),
    *("rope_theta", "rope_scaling", "rope_parameters", "tie_word_embeddings", "eos_token_id"),
    *("bos_token_id", "pad_token_id", "sliding_window", "layer_types", "quantization"),
    *("text_config", "attention_bias", "mlp_bias", "hidden_act", "type_vocab_size"),
    *("partial_rotary_factor", "torch_dtype", "architectures", "num_experts", "n_layer"),
    *("layer_norm_eps", "quantization_config", "use_cache", "model_file", "auto_map"),
]
# What a class of another family makes of these arrays is its own affair, as long as it ends.
FAMILIES = [
    *("gpt2", "olmo", "mamba", "mamba2", "gemma3n", "gemma3_text", "qwen3_next", "deepseek_v3"),
    *("llama4", "openelm", "falcon_h1", "nemotron-nas", "longcat_flash_ngram", "afm7", "rwkv7"),
    *("recurrent_gemma", "phi3", "mixtral", "bert", "xlm-roberta", "modernbert", "qwen3", "x"),
    *("../llama", "base", "cache", "switch_layers", "os", "", None, 5, ["llama"], "kimi_k3"),
]
DEEP: dict[str, Any] = {}
for _ in range(300):
    DEEP = {"text_config": DEEP}
CONFIGS: list[dict[str, Any]] = [
    DEEP,
    {"rope_scaling": {"type": "yarn", "factor": 1e308}},
    {"rope_scaling": {"type": "llama3", "factor": 0, "low_freq_factor": 1, "high_freq_factor": 1}},
    {"rope_scaling": {"type": "longrope", "short_factor": [], "long_factor": [1.0] * 10**5}},
    {"layer_types": ["full_attention"] * 10**5},
    {"layer_types": ["x"]},
    {"model_type": "gpt2", "n_layer": 10**9, "n_embd": 64, "n_head": 4, "n_positions": 64},
    {"quantization": {"group_size": 64, "bits": 4}},
    {"quantization": {"group_size": 0, "bits": 3, "mode": "x"}},
    {"eos_token_id": list(range(10**5))},
    {"eos_token_id": [2**40]},
    {"vocab_size": 10**6},
    {"num_nextn_predict_layers": 10**9, "num_loops": 10**9, "loop_num": 10**9},
]

PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
LONG = "(?:(?:x+x+)+)+y"
PATTERNS = ["", ".", "(a|b|ab)*c", LONG, "(?<!x)a*", "[", "(?i)\\p{L}{0,1000}", "\\Z", "(" * 500]


def added(tokens: int, content: str = "<{}>", **more: Any) -> dict[str, Any]:
    named = [{"id": 300 + i, "content": content.format(i)} for i in range(tokens)]
    return {"added_tokens": [{**PLAIN, "special": True, **each, **more} for each in named]}


def strip(letter: str, start: int, stop: int) -> dict[str, Any]:
    return {"type": "Strip", "content": letter, "start": start, "stop": stop}


def split(pattern: str, behavior: str = "Isolated") -> dict[str, Any]:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": behavior,
        "invert": False,
    }


def replace(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


def sequence(name: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", name: list(parts)}


def byte_pairs(vocabulary: dict[str, int], merges: list[Any], **more: Any) -> dict[str, Any]:
    return {"model": {"type": "BPE", "vocab": vocabulary, "merges": merges, **more}}


TOKENIZERS: list[dict[str, Any]] = [
    *({"decoder": sequence("decoders", strip(letter, 1, 1))} for letter in "aeh \n"),
    {"decoder": sequence("decoders", strip("a", 2**32, 2**32), {"type": "Fuse"})},
    {"decoder": {"type": "Fuse"}},
    {"decoder": {"type": "ByteFallback"}},
    {"decoder": {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True}},
    {"decoder": {"type": "WordPiece", "prefix": "", "cleanup": True}},
    {"decoder": {"type": "BPEDecoder", "suffix": ""}},
    {"decoder": None},
    *({"decoder": sequence("decoders", replace(each, "z" * 1000))} for each in PATTERNS),
    {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    {"pre_tokenizer": {"type": "FixedLength", "length": 2**63}},
    {"pre_tokenizer": {"type": "Punctuation", "behavior": "Removed"}},
    {"pre_tokenizer": {"type": "CharDelimiterSplit", "delimiter": "h"}},
    {"pre_tokenizer": None},
    *({"pre_tokenizer": split(each)} for each in PATTERNS),
    *({"pre_tokenizer": split("h", each)} for each in ("Removed", "MergedWithPrevious", "x")),
    {"normalizer": sequence("normalizers", *[replace("a", "aa")] * 16)},
    {"normalizer": sequence("normalizers", *[replace(".", "ab")] * 14)},
    {"normalizer": {"type": "Prepend", "prepend": "x" * 10**5}},
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}},
    {"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "x"}},
    *({"normalizer": replace(each, "")} for each in PATTERNS),
    {"post_processor": {"type": "BertProcessing", "sep": ["x", 10**9], "cls": ["y", 2**32 - 1]}},
    {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "x", "type_id": 2**31}}] * 10,
            "pair": [{"Sequence": {"id": "B", "type_id": 7}}],
            "special_tokens": {"x": {"id": "x", "ids": [2**32 - 1] * 10, "tokens": ["x"] * 10}},
        }
    },
    {
        "truncation": {
            "direction": "Right",
            "max_length": 1,
            "strategy": "LongestFirst",
            "stride": 5,
        }
    },
    {
        "padding": {
            "strategy": {"Fixed": 2**40},
            "direction": "Left",
            "pad_to_multiple_of": 0,
            "pad_id": 2**32 - 1,
            "pad_type_id": 9,
            "pad_token": "x",
        }
    },
    added(0),
    added(20_000),
    added(10, "x" * 10**5 + "{}"),
    added(1, ""),
    added(3, " "),
    added(3, "a"),
    added(3, normalized=True, lstrip=True, rstrip=True, single_word=True),
    {"added_tokens": [{**PLAIN, "special": True, "id": 2**32 - 1, "content": "<far>"}]},
    byte_pairs({}, []),
    byte_pairs({"a": 0}, [], unk_token="nowhere"),
    byte_pairs({"a": 2**32 - 1, "b": 10**9, "h": 5}, []),
    byte_pairs({"a": 0, "b": 0, "aa": 1}, [["a", "a"]]),
    byte_pairs({"a": 0, "b": 1}, [["a", "b"]]),
    byte_pairs({"a": -1}, []),
    byte_pairs({"a": 0, "<0x61>": 1}, [], byte_fallback=True, unk_token="a", fuse_unk=True),
    byte_pairs({"a": 0}, [], dropout=0.99),
    byte_pairs({"a": 0}, [], dropout=5, continuing_subword_prefix="##", end_of_word_suffix="a"),
    {"model": {"type": "Unigram", "vocab": [], "unk_id": 5}},
    {"model": {"type": "Unigram", "vocab": [["a", -1e308], ["b", 1e308]], "unk_id": 0}},
    {"model": {"type": "Unigram", "vocab": [["", 0.0], ["a", 0.0]], "unk_id": None}},
    {"model": {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "[UNK]"}},
    {
        "model": {
            "type": "WordPiece",
            "vocab": {"a": 0, "[UNK]": 1},
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "",
            "max_input_chars_per_word": 2**63,
        }
    },
    {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}},
    {"model": None},
]
TOKENIZER_CONFIGS: list[dict[str, Any]] = [
    *({"model_max_length": each} for each in NUMBERS),
    *({"eos_token": each} for each in ("", "nowhere", 5, None, {"content": "a"}, {"content": 7})),
    *({"tool_parser_type": each} for each in ("os", "../x", 5, "")),
    *({"tokenizer_class": each} for each in ("BertTokenizer", "os.system", 5, None, "LlamaTok")),
    {"chat_template": {"default": "x"}},
    {"chat_template": [{"name": "default", "template": "{{ 1/0 }}"}]},
    {"chat_template": 5},
    {"extra_special_tokens": ["x"] * 10_000},
    {"added_tokens_decoder": {"5": {"content": "x"}, "x": 1}},
    {"added_tokens_decoder": {str(10**9): {**PLAIN, "content": "far", "special": True}}},
    {"auto_map": {"AutoTokenizer": ["x.Y", None]}},
    {"truncation_side": 5, "padding_side": "up", "add_eos_token": True, "add_bos_token": "x"},
    {"response_template": {"x": "(((("}},
]
TEMPLATES = [
    "",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
    "{{ 'x' * 10**12 }}",
    "{{ raise_exception('no') }}",
    "{{ messages[0]['content'] * 9999 }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{% if",
    "{{ messages[9]['content'] }}",
    "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    "\ud800",
    "\x00" * 1000,
    "{{ x" + "." * 9999 + " }}",
    "(" * 9999 + "{{" + "(" * 3000 + "1" + ")" * 3000 + "}}",
]
FILES = ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
TEXTS = [b"", b"{", b"[]", b"null", b"5", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"a":' * 5000]
SAMPLING = ["temperature", "top_p", "top_k", "eos_token_id", "repetition_penalty", "structured"]


def change(file: str, changes: dict[str, Any], folder: Path) -> None:
    """Change keys of a JSON object."""
    path = folder / file
    whole = json.loads(path.read_bytes()) if path.is_file() else {}
    path.write_text(json.dumps({**whole, **changes}))


def write(file: str, content: bytes, folder: Path) -> None:
    """Write a file anew."""
    (folder / file).write_bytes(content)


def write_template(text: str, folder: Path) -> None:
    """Write a chat template, which need not be text."""
    write("chat_template.jinja", text.encode("utf-8", "surrogatepass"), folder)


WEIGHTS = "model.safetensors"


def read_weights(folder: Path, index: int) -> tuple[dict[str, Any], bytes, str]:
    """Return the header of the weights, the rest, and the name of an array by its place."""
    content = (folder / WEIGHTS).read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    names = [name for name in header if name != "__metadata__"]
    return header, content[8 + length :], names[index % len(names)]


def write_weights(folder: Path, header: dict[str, Any], rest: bytes) -> None:
    text = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + rest)


def describe(index: int, changes: dict[str, Any], folder: Path) -> None:
    """Change an array's entry in the header."""
    header, rest, name = read_weights(folder, index)
    header[name].update(changes)
    write_weights(folder, header, rest)


def rename(index: int, name: str, folder: Path) -> None:
    """Give an array another name; without one it goes."""
    header, rest, old = read_weights(folder, index)
    array = header.pop(old)
    if name:
        header[name] = array
    write_weights(folder, header, rest)


def cut(share: float, put: bytes, folder: Path) -> None:
    """Put bytes in the place of the weights' rest."""
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: int(share * len(content))] + put)


SHAPES: list[Any] = [[], [0], [2**40], [2**63, 2**63], [-1, -1], ["x"], None, 5, [1.5], [1] * 100]
DTYPES = ["F64", "F16", "BF16", "I64", "U8", "BOOL", "F8_E4M3", "x"]
OFFSETS: list[Any] = [[0, 0], [0, 2**62], [5, 1], [-8, 8], [0], "x"]
NAMES = [
    *("", "x", "lm_head.scales", "../x", "a." * 5000),
    *("model.layers.99999999.mlp.up_proj.weight", "model.layers.-1.mlp.up_proj.weight"),
]
DESCRIPTIONS = [
    *({"shape": each} for each in SHAPES),
    *({"dtype": each} for each in DTYPES),
    *({"data_offsets": each} for each in OFFSETS),
    {"shape": [0], "data_offsets": [0, 0]},
]


def one_key(keys: list[str], values: list[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(
        lambda key, value: {key: value}, st.sampled_from(keys), st.sampled_from(values)
    )


def spoil(function: Any, *arguments: Any) -> st.SearchStrategy[Spoil]:
    """Give a function of a folder with arguments, each of which is chosen of a list, or drawn."""
    chosen = [st.sampled_from(each) if isinstance(each, list) else each for each in arguments]
    return st.builds(partial, st.just(function), *chosen)


CONFIG, PLACES = st.just("config.json"), st.integers(0, 30)
SPOILS: st.SearchStrategy[Spoil] = st.one_of(
    spoil(change, CONFIG, one_key(KEYS, NUMBERS)),
    spoil(change, CONFIG, one_key(["model_type"], FAMILIES)),
    spoil(change, CONFIG, CONFIGS),
    spoil(change, st.just("tokenizer.json"), TOKENIZERS),
    spoil(change, st.just("tokenizer_config.json"), TOKENIZER_CONFIGS),
    spoil(change, st.just("generation_config.json"), one_key(SAMPLING, NUMBERS)),
    spoil(write_template, TEMPLATES),
    spoil(describe, PLACES, DESCRIPTIONS),
    spoil(rename, PLACES, NAMES),
    spoil(cut, st.floats(0, 1), st.binary(max_size=20)),
    spoil(write, FILES, TEXTS),
)


def spoiled(base: Path, folder: Path, spoils: list[Spoil]) -> Path:
    """Copy a checkpoint and spoil it; leave out spoils that no longer apply."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(base, folder)
    for each in spoils:
        try:
            each(folder)
        except (ValueError, TypeError, OSError, struct.error, RecursionError, IndexError):
            continue
    return folder
