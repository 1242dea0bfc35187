"""The Protocols of engines: app passes the real ones, tests pass scripted ones."""

from collections.abc import Generator, Mapping, Sequence
from typing import Any, Protocol

from gateway.jobs import TokenIds, Vectors
from gateway.jobs.chat import Compiled, GenerateJob, Grammar, Reading
from gateway.jobs.rerank import Pair
from gateway.jobs.steps import (
    EngineFacts,
    PrefixPiece,
    SequenceParams,
    StepPlan,
    StepResult,
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

    @property
    def has_patterns(self) -> bool:
        """Return True if patterns of the model's files are tried on texts, which may take long."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenize, special tokens included. Safe on any thread."""

    def encode_start(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenize as much as `truncate` needs; a longer text has more ids than `max_tokens`."""

    def truncate(self, tokens: TokenIds, limit: int | None = None) -> list[int]:
        """Cut one input to `limit`, or to `max_tokens`, as sentence-transformers would."""

    def shorten(self, vectors: Vectors, dimensions: int) -> Vectors:
        """Keep the first `dimensions` of each vector, normalized again if the model does."""

    def embed(self, rows: Sequence[TokenIds]) -> Vectors:
        """Return (rows, dimensions) float32. On the lane only."""

    def probe(self) -> None:
        """Embed a word of the model's own, without compiling anything; raise the device's error.
        On the lane only.
        """

    def nbytes(self) -> int:
        """Return the bytes held on the device."""

    def close(self) -> None:
        """Free every array. On the lane only."""


class RerankEngine(Protocol):
    """The maths of one reranker, which reads a query and a document together."""

    @property
    def max_tokens(self) -> int:
        """Return the longest pair the model can read, special tokens included."""

    def encode_pairs(
        self,
        query: str,
        documents: Sequence[str],
        *,
        max_document_tokens: int | None = None,
        instruction: str | None = None,
    ) -> list[Pair]:
        """Tokenize the query with each document, which is cut to fit. Safe on any thread.

        Only a model whose prompt has an instruction reads one. Raises ContextLengthExceeded for a
        query that leaves no room for a token of a document.
        """

    def score(self, rows: Sequence[Pair]) -> Vectors:
        """Return the logits, (rows, labels) float32. On the lane only."""

    def probe(self) -> None:
        """Score a pair of the model's own, without compiling anything; raise the device's error.
        On the lane only.
        """

    def nbytes(self) -> int:
        """Return the bytes held on the device."""

    def close(self) -> None:
        """Free every array. On the lane only."""


class Tokens(Protocol):
    """A chat model's tokenizer. Safe on any thread."""

    @property
    def tokenizer(self) -> Any:
        """Return transformers' tokenizer, which has the special tokens and the template."""

    def tokenize(self, job: GenerateJob, *, special: bool, asking: bool) -> list[int]:
        """Return the ids of a text, or of a conversation, ready to be answered if `asking`.

        A text has the special tokens around it, if `special`. Raises BadRequest for a conversation
        that the template refuses.
        """

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the vocabulary's strings of ids; an empty one for an unknown id."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens too."""


class PrefixCache(Protocol):
    """The KV kept of a chat model's prompts, as files need it. On the lane only."""

    @property
    def pool_bytes(self) -> int:
        """Return the bytes kept by all models that share the pool."""

    def pieces(self, adapter: int) -> Sequence[PrefixPiece]:
        """Return an adapter's KV in pieces for files, the last used first; a piece comes after
        those that it continues.
        """

    def copy_piece(self, adapter: int, piece: PrefixPiece) -> bytes | None:
        """Return a piece's content; None if some of it has gone meanwhile."""

    def put_piece(self, adapter: int, salt: str, content: bytes) -> bool:
        """Keep the content of a piece of earlier prompts; return False if there is no more room.
        Content that `copy_piece` did not return for this model may raise any error.
        """


class GenerationEngine(Protocol):
    """The maths of one chat model: a batch that sequences join and leave between passes."""

    @property
    def facts(self) -> EngineFacts:
        """Return the facts that do not change while it is loaded."""

    @property
    def tokens(self) -> Tokens:
        """Return the model's tokenizer."""

    @property
    def prefixes(self) -> PrefixCache | None:
        """Return the KV kept of its prompts; None if no one process has all of it."""

    @property
    def is_batched(self) -> bool:
        """Return True while sequences run together, False once they run one at a time."""

    def prepare(self, job: GenerateJob) -> list[SequenceParams]:
        """Render the template and encode the prompt: one sequence per choice. Safe on any thread.

        Raises BadRequest for a conversation that the template refuses, and ContextLengthExceeded
        for a prompt that leaves no room for one token.
        """

    def compile(self, grammar: Grammar) -> Compiled:
        """Compile a grammar; slow, and safe on any thread.

        Raises BadRequest naming the keyword or place that cannot be compiled.
        """

    def matches_schema(self, schema: str, answer: str) -> bool | None:
        """Return True if an answer matches a JSON Schema, both as text; None if that is unknown.

        Slow, and safe on any thread.
        """

    def read_answer(self, params: SequenceParams, text: str, is_cut: bool) -> Reading:
        """Return the parts of a whole answer, for a sequence that `reads_whole`: its thoughts, text
        and calls; and None, or an event to log with the reason why it stays text. `text` joins the
        texts of all the sequence's deltas; a cut one makes no call. Slow, and safe on any thread.

        Raises Overloaded and Unavailable if other work leaves no time to read it.
        """

    def step(self, plan: StepPlan) -> StepResult:
        """Change the batch as planned, then run a pass. On the lane only.

        A decode pass gives the next token of every running sequence. An error of a pass changes no
        answer: its sequences are read again; one that fails alone, or cannot join, ends by its
        delta.
        """

    def synchronize(self) -> None:
        """Wait until the device has finished its launched work. On the lane only."""

    def self_test(self) -> Generator[Verdict]:
        """Compare sequences in batches with the same sequences alone, one pass a step. On the lane
        only.

        Each step yields the verdict so far; the last one's has no field unknown.
        """

    def time_step(self, rows: int) -> Generator[float | None]:
        """Time a decode step of `rows` sequences, one pass a step. The last yields its seconds,
        the others None. On the lane only.
        """

    def apply_verdict(self, verdict: Verdict) -> None:
        """Stop running sequences in ways that a verdict found wrong. Until one is whole, sequences
        of an architecture that is not known to be right in batches run one at a time. On the lane
        only.
        """

    def probe(self) -> None:
        """Read a prompt of the model's own, apart from all sequences, without compiling anything;
        raise the device's error. On the lane only.
        """

    def routing_keys(self, adapter: int = 0) -> Sequence[bytes]:
        """Return the routing keys of the kept prompts. Safe on any thread."""

    def drop_adapter(self, number: int) -> None:
        """Free an adapter, with its sequences. On the lane only."""

    def nbytes(self) -> int:
        """Return the bytes held on the device: weights, KV and prefixes."""

    def close(self) -> None:
        """Free every array. On the lane only."""
