"""What serving asks of an engine. app hands in the real ones, tests hand in scripted ones."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from gateway.jobs import GenerateJob, Grammar, Pass, RowDelta, RowJob, TokenIds, Vectors


class EmbeddingEngine(Protocol):
    """The maths of one embedding model."""

    @property
    def dimensions(self) -> int:
        """Give the length of a vector."""

    @property
    def max_tokens(self) -> int:
        """Give the longest input the model can read, special tokens included."""

    @property
    def vocab_size(self) -> int:
        """Count the token ids the model knows."""

    @property
    def prompts(self) -> Mapping[str, str]:
        """Give the texts to put before an input, by prompt name."""

    @property
    def default_prompt_name(self) -> str | None:
        """Give the prompt used when the caller names none."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenise, special tokens included. Safe on any thread."""

    def truncate(self, tokens: TokenIds) -> list[int]:
        """Cut one input to `max_tokens` as sentence-transformers would."""

    def shorten(self, vectors: Vectors, dimensions: int) -> Vectors:
        """Keep the first `dimensions` of each vector, normalised again if the model does."""

    def embed(self, rows: Sequence[TokenIds]) -> Vectors:
        """Give (rows, dimensions) float32. On the lane only."""

    def nbytes(self) -> int:
        """Count the bytes held on the device."""

    def close(self) -> None:
        """Let go of every array. On the lane only."""


class GenerationEngine(Protocol):
    """The maths of one chat model: a batch that rows join and leave between steps."""

    @property
    def max_context(self) -> int:
        """Give the most tokens a prompt and its answer may have together."""

    @property
    def rows(self) -> int:
        """Count the rows inside, reading or running. Safe on any thread."""

    def plan(self, job: GenerateJob) -> list[RowJob]:
        """Render, encode and measure: one row a choice. Safe on any thread.

        Raises BadRequest for what the template refuses and ContextLengthExceeded for a prompt
        that leaves no room for one token.
        """

    def compile(self, grammar: Grammar) -> object:
        """Make a grammar ready for rows; slow, and safe on any thread.

        Raises BadRequest naming the keyword or place that cannot be compiled.
        """

    def join(self, job: RowJob) -> int:
        """Queue a row for prefill and give its id. On the lane only."""

    def leave(self, row: int) -> None:
        """Drop a row, wherever it is; an unknown id is fine. On the lane only."""

    def curtail(self, row: int, max_tokens: int) -> None:
        """Let a running row say no more than so many tokens. On the lane only."""

    def forget(self) -> None:
        """Let go of what is kept of prompts. On the lane only."""

    @property
    def kept_bytes(self) -> int:
        """Count the bytes kept of prompts that others may begin with."""

    def prefill(self, token_budget: int) -> list[RowDelta]:
        """Read at most about `token_budget` padded prompt tokens. On the lane only."""

    def decode(self) -> list[RowDelta]:
        """Give every running row its next token. On the lane only."""

    @property
    def last_pass(self) -> Pass:
        """Tell what the last call of `prefill` or `decode` did. On the lane only."""

    def settle(self) -> None:
        """Wait until the device has done what was begun. On the lane only."""

    @property
    def is_prefilling(self) -> bool:
        """Tell whether a row still has prompt to read."""

    @property
    def is_decoding(self) -> bool:
        """Tell whether a row is running."""

    def nbytes(self) -> int:
        """Count the bytes held on the device: weights, KV and prefixes."""

    def close(self) -> None:
        """Let go of every array. On the lane only."""
