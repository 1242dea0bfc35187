"""What serving asks of an engine. app hands in the real ones, tests hand in scripted ones."""

from collections.abc import Generator, Mapping, Sequence
from typing import Protocol

from gateway.jobs import (
    Compiled,
    GenerateJob,
    Grammar,
    KvCost,
    Pass,
    SequenceDelta,
    SequenceParams,
    TokenIds,
    Vectors,
    Verdict,
)


class EmbeddingEngine(Protocol):
    """The maths of one embedding model."""

    @property
    def dimensions(self) -> int:
        """Return the length of a vector."""

    @property
    def max_tokens(self) -> int:
        """Return the longest input the model can read, special tokens included."""

    @property
    def vocab_size(self) -> int:
        """Return the number of token ids the model knows."""

    @property
    def prompts(self) -> Mapping[str, str]:
        """Return the texts to put before an input, by prompt name."""

    @property
    def default_prompt_name(self) -> str | None:
        """Return the prompt used when the caller names none."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenise, special tokens included. Safe on any thread."""

    def encode_start(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenise as far as `truncate` keeps; more ids than `max_tokens` only tell of more."""

    def truncate(self, tokens: TokenIds) -> list[int]:
        """Cut one input to `max_tokens` as sentence-transformers would."""

    def shorten(self, vectors: Vectors, dimensions: int) -> Vectors:
        """Keep the first `dimensions` of each vector, normalised again if the model does."""

    def embed(self, rows: Sequence[TokenIds]) -> Vectors:
        """Return (rows, dimensions) float32. On the lane only."""

    def nbytes(self) -> int:
        """Return the bytes held on the device."""

    def close(self) -> None:
        """Free every array. On the lane only."""


class GenerationEngine(Protocol):
    """The maths of one chat model: a batch that rows join and leave between steps."""

    @property
    def max_context(self) -> int:
        """Return the most tokens a prompt and its answer may have together."""

    @property
    def rows(self) -> int:
        """Return the number of rows inside, reading or running. Safe on any thread."""

    def plan(self, job: GenerateJob) -> list[SequenceParams]:
        """Render, encode and measure: one row a choice. Safe on any thread.

        Raises BadRequest for what the template refuses and ContextLengthExceeded for a prompt
        that leaves no room for one token.
        """

    def compile(self, grammar: Grammar) -> Compiled:
        """Make a grammar ready for rows; slow, and safe on any thread.

        Raises BadRequest naming the keyword or place that cannot be compiled.
        """

    def fits(self, schema: str, answer: str) -> bool | None:
        """Judge a finished answer by a JSON Schema, both as text; None where that cannot be told.

        Slow, and safe on any thread.
        """

    def join(self, job: SequenceParams) -> int:
        """Queue a row for prefill and give its id. On the lane only."""

    @property
    def is_batched(self) -> bool:
        """Return True while rows run together, False once they run one at a time."""

    def self_test(self) -> Generator[Verdict]:
        """Compare rows in batches with the same rows alone, a pass a step, on the lane only.

        Each step yields what is known by then; the last one leaves nothing unknown.
        """

    @property
    def self_test_tokens(self) -> int:
        """Return the most tokens that a row of the self-test has."""

    def hold_to(self, verdict: Verdict) -> None:
        """Run rows only as a verdict has not found wrong. On the lane only."""

    def take_faults(self) -> Sequence[str]:
        """Return what passes have thrown since this was last asked. On the lane only."""

    def leave(self, row: int) -> None:
        """Drop a row, wherever it is; an unknown id is fine. On the lane only."""

    def park(self, row: int) -> None:
        """Stop a row, its KV kept; one that is being read stops thereafter. On the lane only."""

    def preempt(self, row: int) -> None:
        """Stop a row and free its KV: resumed, it is read again from all it has read and said, and
        goes on as if nothing had happened. On the lane only.
        """

    def resume(self, row: int) -> None:
        """Resume a row that was parked or preempted. On the lane only."""

    def cap_tokens(self, row: int, max_tokens: int) -> list[SequenceDelta]:
        """Let a row say no more than so many tokens, wherever it is.

        Returns the end of one that is parked or preempted and has said as many. On the lane only.
        """

    def forget(self) -> None:
        """Free the kept prefixes. On the lane only."""

    @property
    def kept_bytes(self) -> int:
        """Return the bytes kept of prompts that others may begin with."""

    def prefill(self, token_budget: int) -> list[SequenceDelta]:
        """Read at most about `token_budget` padded prompt tokens. On the lane only."""

    def decode(self) -> list[SequenceDelta]:
        """Decode the next token of every running row. On the lane only."""

    @property
    def last_pass(self) -> Pass:
        """Return what the last call of `prefill` or `decode` did. On the lane only."""

    def settle(self) -> None:
        """Wait until the device has done what was begun. On the lane only."""

    @property
    def kv_cost(self) -> KvCost:
        """Return what a row's KV costs; an empty cost if unknown."""

    @property
    def reading(self) -> frozenset[int]:
        """Return the rows that still have prompt to read."""

    @property
    def is_prefilling(self) -> bool:
        """Return True if a row still has prompt to read."""

    @property
    def is_decoding(self) -> bool:
        """Return True if a row is running."""

    def nbytes(self) -> int:
        """Return the bytes held on the device: weights, KV and prefixes."""

    def close(self) -> None:
        """Free every array. On the lane only."""
