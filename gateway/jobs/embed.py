"""Jobs of embedding models."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from gateway.jobs import Caller, TokenIds, Vectors

Output = Literal["dense", "sparse", "multi_vector"]


@dataclass(frozen=True, slots=True)
class SparseVector:
    """A text's weights by token id: both (entries,), ids ascending and weights above 0."""

    ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOutputs:
    """All that a model computes of one text; None is what was not asked for."""

    dense: npt.NDArray[np.float32] | None = None  # (dimensions,)
    sparse: SparseVector | None = None
    multi_vector: Vectors | None = None  # (tokens, token dimensions)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedJob:
    """Texts, or rows of token ids, to turn into vectors."""

    caller: Caller
    texts: Sequence[str] = ()
    token_rows: Sequence[TokenIds] = ()
    # True: inputs that are too long are cut. False: they are refused.
    truncate: bool = False
    # A Matryoshka model's vectors are shortened to this size.
    dimensions: int | None = None
    prompt_name: str | None = None
    # Instead of `prompt_name`: the first prompt of these that the model has, else none.
    prompt_names: Sequence[str] | None = None
    max_tokens: int | None = None  # a lower limit of an input than the model's
    outputs: tuple[Output, ...] = ()  # each once; none: the model's first output
    max_numbers: int | None = None  # the most numbers that its multi-vectors may have together


@dataclass(frozen=True, slots=True)
class Embedded:
    """The answer to an `EmbedJob`, in the order of the inputs; empty if not asked for."""

    vectors: Vectors  # the dense ones, (inputs, dimensions) float32
    prompt_tokens: int
    truncated: int
    sparse: Sequence[SparseVector] = ()
    multi_vector: Sequence[Vectors] = ()
