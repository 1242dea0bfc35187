"""Jobs of embedding models."""

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.jobs import Caller, TokenIds, Vectors


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


@dataclass(frozen=True, slots=True)
class Embedded:
    """The answer to an `EmbedJob`: (inputs, dimensions) float32, in the order of the inputs."""

    vectors: Vectors
    prompt_tokens: int
    truncated: int
