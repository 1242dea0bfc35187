"""The cells of the public tables of MLX embeddings and reranking, mlxcel's, measured here.

Source: https://github.com/lablup/mlxcel, docs/benchmark_results: embeddings-rerank-gb10-2026-08-26,
embeddings-rerank-m5max-2026-09-09 and embeddings-rerank-m1ultra-2026-09-09.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Final, NamedTuple

from benchmarks.checkpoints import write_bge_base, write_reranker
from benchmarks.device.results import Figure
from benchmarks.device.shapes import SHAPES, Shape, folder_of
from benchmarks.device.speed import OURS
from benchmarks.loading import load_cross_encoder, load_embedding
from gateway.engine.device import Device
from gateway.jobs.rerank import Pair

NAME: Final = "public cells"
ROUNDS: Final = 5  # measured, after one that does not count; theirs are as many
SHORT_TOKENS: Final = 18
PAIR_TOKENS: Final = 34  # a query and a short document
QUERY_TOKENS: Final = 14
PEERS: Final = ("mlxcel, GB10", "mlxcel, M5 Max", "mlxcel, M1 Ultra")
_LARGE: Final = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "max_position_embeddings": 8192,
}
_MINILM: Final = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6}
_SMALL: Final = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
# https://huggingface.co/google/embeddinggemma-300m: without its two linear layers after the pooling
EMBEDDING_GEMMA: Final = Shape(
    "embeddinggemma",
    {
        "model_type": "gemma3_text",
        "use_bidirectional_attention": True,
        "hidden_size": 768,
        "intermediate_size": 1152,
        "num_hidden_layers": 24,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 2048,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "vocab_size": 262_144,
    },
    {"query_pre_attn_scalar": 64, "sliding_window_pattern": 2, "num_hidden_layers": 4},
)


class Model(NamedTuple):
    """A model of the tables: a BERT, whose config differs from bge-base's, or another shape."""

    name: str
    config: Mapping[str, Any] = {}
    shape: Shape | None = None
    form: str = "float32"
    long_tokens: int = 256  # the same paragraph, by the tokenizer of the model
    # Milliseconds of `PEERS`, by the cell.
    theirs: Mapping[str, Sequence[float | None]] = {}


ONE, SHORT, LONG = "1 short", "32 short", "32 long"
FEW, MANY = "8 short documents", "32 short documents"
EMBEDDERS: Final = (
    Model(
        "all-MiniLM-L6-v2",
        _MINILM,
        theirs={ONE: (2.66, 4.79, 4.15), SHORT: (9.2, 9.82, 15.91), LONG: (66.2, 35.05, 62.28)},
    ),
    Model(
        "bge-m3",
        _LARGE,
        long_tokens=686,
        theirs={
            ONE: (11.64, 6.78, 16.6),
            SHORT: (39.0, 28.42, 90.39),
            LONG: (1991.3, 625.88, 1640.66),
        },
    ),
    Model(
        "embeddinggemma-300m",
        shape=EMBEDDING_GEMMA,
        form="4bit",
        long_tokens=483,
        theirs={
            ONE: (6.37, 4.28, 13.79),
            SHORT: (32.2, 17.28, 47.85),
            LONG: (220.7, 118.73, 406.47),
        },
    ),
    Model(
        "Qwen3-Embedding-0.6B",
        shape=SHAPES["qwen3-0.6b"],
        form="bfloat16",
        long_tokens=524,
        theirs={
            ONE: (10.12, 7.37, 11.28),
            SHORT: (42.6, 29.13, 84.67),
            LONG: (513.9, 378.08, 1379.7),
        },
    ),
)
RERANKERS: Final = (
    Model("ms-marco-MiniLM-L6-v2", theirs={FEW: (2.3, 5.84, 6.31), MANY: (6.7, None, None)}),
    Model(
        "bge-reranker-v2-m3", _LARGE, theirs={FEW: (17.4, 16.65, 38.19), MANY: (70.8, None, None)}
    ),
)


def measure_cells(models: Path, device: Device, *, is_small: bool) -> list[Figure]:
    """Measure every cell in milliseconds: the median of passes of the engine alone."""
    figures: list[Figure] = []
    for model in EMBEDDERS:
        engine = load_embedding(
            _folder(model, models, is_small=is_small),
            name=model.name,
            device=device,
            pooling=None if model.shape is None else "last",
            normalize=True,
        )
        long_tokens = 64 if is_small else model.long_tokens
        cells = {ONE: (1, SHORT_TOKENS), SHORT: (32, SHORT_TOKENS), LONG: (32, long_tokens)}
        figures += _measure(model, engine, engine.embed, _rows, cells, is_small=is_small)
    for model in RERANKERS:
        scorer = load_cross_encoder(
            _folder(model, models, is_small=is_small), name=model.name, device=device
        )
        cells = {FEW: (8, PAIR_TOKENS), MANY: (32, PAIR_TOKENS)}
        figures += _measure(model, scorer, scorer.score, _pairs, cells, is_small=is_small)
    return figures


def _folder(model: Model, models: Path, *, is_small: bool) -> Path:
    """Return the folder of a model; write it unless it is there."""
    if model.shape is not None:
        return folder_of(model.shape, model.form, models, is_small=is_small)
    folder = models / f"{model.name}-{'small' if is_small else 'full'}"
    if not (folder / "model.safetensors").exists():
        write = write_reranker if model in RERANKERS else write_bge_base
        write(folder, **{**model.config, **(_SMALL if is_small else {})})
    return folder


def _rows(count: int, tokens: int, vocabulary: int, random: Random) -> list[list[int]]:
    return [random.choices(range(5, vocabulary), k=tokens) for _ in range(count)]


def _pairs(count: int, tokens: int, vocabulary: int, random: Random) -> list[Pair]:
    return [Pair(ids, QUERY_TOKENS) for ids in _rows(count, tokens, vocabulary, random)]


def _measure(
    model: Model,
    engine: Any,
    compute: Callable[[Any], Any],
    draw: Callable[[int, int, int, Random], Any],
    cells: Mapping[str, tuple[int, int]],
    *,
    is_small: bool,
) -> list[Figure]:
    computed = str(engine.dtype).removeprefix("mlx.core.")
    dtype = model.form if computed == model.form else f"{model.form} (as {computed})"
    shape = f"{model.name}, small" if is_small else model.name
    figures = []
    for at, (count, tokens) in cells.items():
        spent = []
        for turn in range(ROUNDS + 1):
            rows = draw(count, tokens, min(engine.vocab_size, 4096), Random(turn))
            started = time.perf_counter()
            compute(rows)
            spent.append(time.perf_counter() - started)
        here = [(OURS, 1e3 * median(spent[1:]))]
        theirs = [] if is_small else zip(PEERS, model.theirs[at], strict=True)
        figures += [
            Figure(NAME, value, "ms", who, shape, dtype, at)
            for who, value in (*here, *theirs)
            if value is not None
        ]
    engine.close()
    return figures
