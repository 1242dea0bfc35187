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


@dataclass(frozen=True, slots=True)
class Embedded:
    """The answer to an `EmbedJob`: (inputs, dimensions) float32, in the order of the inputs."""

    vectors: Vectors
    prompt_tokens: int
    truncated: int
