"""GGUF files written where a test wants them, tiny models with random weights among them.

Needs numpy alone, for `tests/golden/make_gguf_numbers.py` writes the same files elsewhere.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

# The numbers of the format, and the bytes of each type's blocks: ggml's docs/gguf.md.
TYPES = {
    "F32": (0, 1, 4),
    "F16": (1, 1, 2),
    "Q4_0": (2, 32, 18),
    "Q4_1": (3, 32, 20),
    "Q5_0": (6, 32, 22),
    "Q5_1": (7, 32, 24),
    "Q8_0": (8, 32, 34),
    "Q2_K": (10, 256, 84),
    "Q3_K": (11, 256, 110),
    "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210),
    "IQ4_NL": (20, 32, 18),
    "IQ4_XS": (23, 256, 136),
    "I8": (24, 1, 1),
    "BF16": (30, 1, 2),
    "MXFP4": (39, 32, 17),
}
# The offsets of a block's float16 scales.
_SCALES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
# How far weights are from 0 in blocks whose scale is 1, roughly.
_SPREAD = {
    "Q4_0": 4.6,
    "Q4_1": 9.0,
    "Q5_0": 9.2,
    "Q5_1": 18.0,
    "Q8_0": 74.0,
    "Q2_K": 14.0,
    "Q3_K": 42.0,
    "Q4_K": 330.0,
    "Q5_K": 660.0,
    "Q6_K": 1370.0,
    "IQ4_NL": 65.0,
    "IQ4_XS": 1200.0,
}
_ALIGNMENT = 32


@dataclass(frozen=True)
class Stored:
    """A tensor as it is in the file: its shape has rows before columns."""

    kind: str
    shape: tuple[int, ...]
    content: bytes


@dataclass(frozen=True)
class Number:
    """A number of the metadata, by struct's letter for its type."""

    form: str
    value: float


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Stored],
    *,
    version: int = 3,
    alignment: int = _ALIGNMENT,
) -> Path:
    """Write a file. Whole numbers become uint32, others float32, lists arrays of their items."""
    out = bytearray(b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata)))
    for key, value in metadata.items():
        out += text(key) + _value(value)
    at = 0
    for name, stored in tensors.items():
        out += text(name) + struct.pack("<I", len(stored.shape))
        out += b"".join(struct.pack("<Q", size) for size in reversed(stored.shape))
        out += struct.pack("<IQ", TYPES[stored.kind][0], at)
        at += -(-len(stored.content) // alignment) * alignment
    for stored in tensors.values():
        out += bytes(-len(out) % alignment) + stored.content
    path.write_bytes(out)
    return path


def text(value: str) -> bytes:
    """Return a text as the format has it."""
    content = value.encode()
    return struct.pack("<Q", len(content)) + content


def _value(value: Any) -> bytes:
    number, content = _typed(value)
    return struct.pack("<I", number) + content


_FORMS = {"B": 0, "b": 1, "H": 2, "h": 3, "I": 4, "i": 5, "f": 6, "Q": 10, "q": 11, "d": 12}


def _typed(value: Any) -> tuple[int, bytes]:
    match value:
        case bool():
            return 7, bytes([value])
        case int():
            return 4, struct.pack("<I", value)
        case float():
            return 6, struct.pack("<f", value)
        case str():
            return 8, text(value)
        case Number():
            return _FORMS[value.form], struct.pack(f"<{value.form}", value.value)
        case list():
            items = [_typed(each) for each in value]
            head = struct.pack("<IQ", items[0][0] if items else 4, len(items))
            return 9, head + b"".join(content for _, content in items)
    raise AssertionError(value)


def floats(kind: str, numbers: npt.NDArray[np.float32]) -> Stored:
    """Store numbers as F32, F16 or BF16."""
    if kind == "BF16":
        content = (numbers.view(np.uint32) >> 16).astype("<u2").tobytes()
    else:
        content = numbers.astype("<f2" if kind == "F16" else "<f4").tobytes()
    return Stored(kind, numbers.shape, content)


def blocks(
    kind: str, shape: Sequence[int], random: np.random.Generator, spread: float = 1.0
) -> Stored:
    """Draw quantized weights: any bytes, but for scales that keep them near `spread`."""
    _, weights, nbytes = TYPES[kind]
    count = math.prod(shape) // weights
    raw = random.integers(0, 256, (count, nbytes), dtype=np.uint8)
    scale = spread / _SPREAD[kind]
    for place, at in enumerate(_SCALES[kind]):
        drawn = scale * random.uniform(0.5, 1.5, count)
        if kind in ("Q4_1", "Q5_1") and place == 1:
            drawn *= -8 if kind == "Q4_1" else -16
        raw[:, at : at + 2] = drawn.astype("<f2").view(np.uint8).reshape(count, 2)
    return Stored(kind, tuple(shape), raw.tobytes())


# ── Tiny models ──────────────────────────────────────────────────────────────────────────────────

HIDDEN, HEADS, KV_HEADS, INNER, LAYERS, CONTEXT = 256, 8, 4, 512, 2, 512
HEAD = {"llama": 32, "qwen2": 32, "qwen3": 128}  # Qwen3's is not HIDDEN / HEADS
# Every type that is read, in one of the three.
KINDS: Mapping[str, Mapping[str, str]] = {
    "llama": {
        "token_embd": "Q8_0",
        "attn_q": "Q4_0",
        "attn_k": "Q4_1",
        "attn_v": "Q6_K",
        "attn_output": "Q5_K",
        "ffn_gate": "Q2_K",
        "ffn_up": "Q3_K",
        "ffn_down": "Q4_K",
    },
    "qwen2": {
        "token_embd": "F16",
        "attn_q": "Q5_0",
        "attn_k": "Q5_1",
        "attn_v": "IQ4_NL",
        "attn_output": "IQ4_XS",
        "ffn_gate": "Q8_0",
        "ffn_up": "F16",
        "ffn_down": "F32",
        "output": "Q6_K",
    },
    "qwen3": dict.fromkeys(
        ("token_embd", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up"), "BF16"
    )
    | {"ffn_down": "BF16"},
}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["t h", "th e", "a n", "Ġ the"]


def letters() -> list[str]:
    """Return how GPT-2's tokenizers spell the bytes 0 to 255.

    https://github.com/openai/gpt-2/blob/master/src/encoder.py: printable bytes are themselves.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def vocabulary() -> dict[str, Any]:
    """Return the metadata of a byte-level tokenizer of 263 tokens, three of them special."""
    tokens = [*SPECIALS, *letters(), *(merge.replace(" ", "") for merge in MERGES)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [
            Number("i", 3 if token in SPECIALS else 1) for token in tokens
        ],
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def describe(architecture: str, **changed: Any) -> dict[str, Any]:
    """Return the metadata of a tiny model; a value of None leaves a key out."""
    own = {
        "block_count": LAYERS,
        "context_length": CONTEXT,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 20_000.0,
        "vocab_size": 263,
    }
    if HEAD[architecture] * HEADS != HIDDEN:
        own |= dict.fromkeys(("attention.key_length", "attention.value_length"), HEAD[architecture])
    metadata = {
        "general.architecture": architecture,
        "general.name": f"a tiny {architecture}",
        "general.quantization_version": 2,
        **{f"{architecture}.{key}": value for key, value in own.items()},
        **vocabulary(),
        **changed,
    }
    return {key: value for key, value in metadata.items() if value is not None}


def weigh(architecture: str, seed: int = 0, **kinds: str) -> dict[str, Stored]:
    """Draw the tensors of a tiny model; `kinds` chooses types in the place of KINDS'."""
    random = np.random.default_rng(seed)
    chosen = {**KINDS[architecture], **kinds}
    head = HEAD[architecture]
    shapes = {
        "attn_q": (HEADS * head, HIDDEN),
        "attn_k": (KV_HEADS * head, HIDDEN),
        "attn_v": (KV_HEADS * head, HIDDEN),
        "attn_output": (HIDDEN, HEADS * head),
        "ffn_gate": (INNER, HIDDEN),
        "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
    }
    vocab_size = len(vocabulary()["tokenizer.ggml.tokens"])

    def drawn(kind: str, shape: tuple[int, ...]) -> Stored:
        spread = 1.5 / math.sqrt(shape[-1])
        if kind in _SCALES:
            return blocks(kind, shape, random, spread)
        return floats(kind, (random.standard_normal(shape) * spread).astype(np.float32))

    def vector(size: int, mean: float) -> Stored:
        numbers = mean + 0.2 * random.standard_normal(size)
        return floats("F32", numbers.astype(np.float32))

    tensors = {"token_embd.weight": drawn(chosen["token_embd"], (vocab_size, HIDDEN))}
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        for norm in ("attn_norm", "ffn_norm"):
            tensors[f"{block}.{norm}.weight"] = vector(HIDDEN, 1.0)
        for name, shape in shapes.items():
            tensors[f"{block}.{name}.weight"] = drawn(chosen[name], shape)
            if architecture == "qwen2" and name in ("attn_q", "attn_k", "attn_v"):
                tensors[f"{block}.{name}.bias"] = vector(shape[0], 0.0)
        if architecture == "qwen3":
            for norm in ("attn_q_norm", "attn_k_norm"):
                tensors[f"{block}.{norm}.weight"] = vector(head, 1.0)
    tensors["output_norm.weight"] = vector(HIDDEN, 1.0)
    if "output" in chosen:
        tensors["output.weight"] = drawn(chosen["output"], (vocab_size, HIDDEN))
    return tensors


def write_model(path: Path, architecture: str = "llama", seed: int = 0, **changed: Any) -> Path:
    """Write a tiny model with random weights; `changed` replaces metadata, None leaves it out."""
    return write_gguf(path, describe(architecture, **changed), weigh(architecture, seed))
