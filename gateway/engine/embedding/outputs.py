"""The outputs besides a dense vector: weights of tokens, and a vector for each token."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from gateway.engine.embedding.bert import Dense, make_dense
from gateway.engine.embedding.pooling import Projection, unit
from gateway.engine.models.checkpoint import Checkpoint, fit_weights
from gateway.engine.models.torch_pickle import read_tensors
from gateway.jobs import TokenIds, Vectors
from gateway.jobs.embed import Output, SparseVector

# BGE-M3's heads beside its weights, each in a file of safetensors or of torch.save.
SPARSE, MULTI_VECTOR = "sparse_linear", "colbert_linear"
_SUFFIXES: Final = (".safetensors", ".pt")


class Head(Protocol):
    """The computation of one output from a text's hidden states."""

    def __call__(self, hidden: mx.array, counts: mx.array, mask: mx.array | None) -> mx.array:
        """Map (rows, tokens, dimensions) to float32 values, whose first axis is the rows."""

    def read(self, ids: TokenIds, values: Vectors) -> SparseVector | Vectors:
        """Return the output of a text from its ids and its row of the values."""


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """BGE-M3's sparse head: each token's weight, and of a token that comes twice the larger one.

    Source: FlagEmbedding, inference/embedder/encoder_only/m3.py, _process_token_weights.
    """

    linear: Dense
    specials: frozenset[int]  # tokens without a weight

    def __call__(self, hidden: mx.array, counts: mx.array, mask: mx.array | None) -> mx.array:
        return mx.maximum(self.linear(hidden.astype(mx.float32))[..., 0], 0)

    def read(self, ids: TokenIds, values: Vectors) -> SparseVector:
        tokens, places = np.unique(ids, return_inverse=True)
        weights = np.zeros(len(tokens), np.float32)
        with np.errstate(invalid="ignore"):
            np.maximum.at(weights, places, values[: len(ids)])
        weights[np.isin(tokens, list(self.specials))] = 0
        return above_zero(tokens, weights)


@dataclass(frozen=True, slots=True)
class TokenVectors:
    """A vector of length 1 for each token that `keep`, a function of a row's ids, is true at."""

    projections: Sequence[Projection]
    keep: Callable[[TokenIds], npt.NDArray[np.bool_]]
    dimensions: int

    def __call__(self, hidden: mx.array, counts: mx.array, mask: mx.array | None) -> mx.array:
        vectors = hidden.astype(mx.float32)
        for project in self.projections:
            vectors = project(vectors)
        return unit(vectors)

    def read(self, ids: TokenIds, values: Vectors) -> Vectors:
        return values[: len(ids)][self.keep(ids)]


def above_zero(tokens: npt.NDArray[Any], weights: npt.NDArray[np.float32]) -> SparseVector:
    """Return the weights above 0; those that are not finite stay, to be found."""
    is_kept = ~(weights <= 0)
    return SparseVector(tokens[is_kept].astype(np.int32), weights[is_kept])


def m3_files(folder: Checkpoint) -> dict[str, str]:
    """Return the names of BGE-M3's head files that a folder has, by the heads' names."""
    names = [(head, head + suffix) for suffix in _SUFFIXES for head in (SPARSE, MULTI_VECTOR)]
    return {head: name for head, name in reversed(names) if (folder.folder / name).is_file()}


def heads_bytes(folder: Checkpoint) -> int:
    """Estimate the bytes of BGE-M3's heads in memory: floats of 32 bits, for 16 in the files."""
    return sum(2 * (folder.folder / file).stat().st_size for file in m3_files(folder).values())


def open_m3_heads(
    folder: Checkpoint, dimensions: int, specials: Callable[[], frozenset[int]]
) -> dict[Output, Head]:
    """Open the heads that the folder has. Raises ModelLoadFailed."""
    heads: dict[Output, Head] = {}
    for head, file in m3_files(folder).items():
        linear = _read_linear(folder, file, dimensions, 1 if head == SPARSE else None)
        if head == SPARSE:
            heads["sparse"] = TokenWeights(linear, specials())
        else:
            project = [Projection(linear, lambda x: x)]
            size = int(linear.weight.shape[1])
            heads["multi_vector"] = TokenVectors(project, lambda ids: np.arange(len(ids)) > 0, size)
    return {output: heads[output] for output in sorted(heads, reverse=True)}


def _read_linear(folder: Checkpoint, file: str, inputs: int, outputs: int | None) -> Dense:
    if file.endswith(".pt"):
        # A head has at most as many outputs as inputs; the rest is for names.
        arrays = read_tensors(folder, file, 8 * (inputs + 1) * inputs + (1 << 17))
    else:
        folder.header(file)
        with folder.blame(f"{file}: "):
            loaded: Any = mx.load(str(folder.folder / file))
            arrays = dict(loaded)
    rows = outputs or max((array.shape[0] for array in arrays.values() if array.ndim), default=0)
    shapes = {"weight": (rows, inputs), "bias": (rows,)}
    weights = fit_weights(folder, arrays, shapes)
    return make_dense({f"{file}.{n}": a.astype(mx.float32) for n, a in weights.items()}, file)


def special_ids(folder: Checkpoint, token_id: Callable[[str], int | None]) -> frozenset[int]:
    """Return the tokens that BGE-M3's sparse head gives no weight to."""
    files = ("special_tokens_map.json", "tokenizer_config.json")
    stated: Mapping[str, Any] = {
        k: v for file in files for k, v in folder.read_object(file).items()
    }
    tokens = [stated.get(f"{role}_token") for role in ("cls", "eos", "pad", "unk")]
    texts = [t.get("content") if isinstance(t, dict) else t for t in tokens]
    ids = frozenset(token_id(text) for text in texts if isinstance(text, str))
    if not ids or None in ids:
        raise folder.failed(
            f"{SPARSE} needs the cls, eos, pad and unk tokens of tokenizer_config.json, "
            "which names none or unknown ones"
        )
    return frozenset(token for token in ids if token is not None)
