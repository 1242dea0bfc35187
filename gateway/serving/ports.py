"""The Protocols of engines."""

from collections.abc import Collection, Generator, Mapping, Sequence
from typing import Any, Protocol

from gateway.jobs import TokenIds, Vectors
from gateway.jobs.chat import Compiled, GenerateJob, Grammar, Reading
from gateway.jobs.embed import Output, TextOutputs
from gateway.jobs.rerank import Pair
from gateway.jobs.steps import (
    EngineFacts,
    PrefixPiece,
    SequenceParams,
    StepPlan,
    StepResult,
    Verdict,
)


class RowEngine(Protocol):
    """What embedding models and rerankers have alike. `probe` and `close` run on the lane."""

    @property
    def token_s(self) -> float:
        """Return an estimate of the seconds that a token takes; 0 if there is none."""

    def probe(self) -> None:
        """Compute a fixed row without compiling anything. Raises the device's errors."""

    def nbytes(self) -> int:
        """Return the bytes held on the device."""

    def close(self) -> None:
        """Free every array."""


class EmbeddingEngine(RowEngine, Protocol):
    """The computations of one embedding model: all but its tokenization run on the lane."""

    @property
    def outputs(self) -> tuple[Output, ...]:
        """Return what the model computes; the first is its answer to who asks for nothing."""

    @property
    def dimensions(self) -> int:
        """Return the length of a vector."""

    @property
    def token_dimensions(self) -> int:
        """Return the length of a token's vector in `multi_vector`, 0 if there is none."""

    @property
    def max_tokens(self) -> int:
        """Return the most tokens of an input, special tokens included."""

    @property
    def query_tokens(self) -> int:
        """Return the most tokens of what `encode_query` returns."""

    @property
    def vocab_size(self) -> int:
        """Return the number of token ids, which begin at 0."""

    @property
    def prompts(self) -> Mapping[str, str]: ...

    @property
    def default_prompt_name(self) -> str | None: ...

    @property
    def has_patterns(self) -> bool:
        """Return True if the tokenizer has regular expressions from files, which may be slow."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the texts' token ids, special tokens included."""

    def encode_query(self, texts: Sequence[str]) -> list[list[int]]:
        """Return queries' token ids, which only models such as ColBERT encode unlike documents'."""

    def encode_start(self, texts: Sequence[str]) -> list[list[int]]:
        """Return each text's first token ids, more than `max_tokens` if the text is too long."""

    def truncate(self, tokens: TokenIds, limit: int | None = None) -> list[int]:
        """Cut one input to `limit` tokens (default `max_tokens`) as sentence-transformers does."""

    def shorten(self, vectors: Vectors, dimensions: int) -> Vectors:
        """Cut each vector to `dimensions`. Normalize it again if the model normalizes vectors."""

    def embed(self, rows: Sequence[TokenIds]) -> Vectors:
        """Return the vectors, (rows, dimensions) float32."""

    def embed_outputs(
        self, rows: Sequence[TokenIds], outputs: Collection[Output]
    ) -> list[TextOutputs]:
        """Return these outputs of each row, of one pass."""

    def in_steps(
        self, rows: Sequence[TokenIds], outputs: Collection[Output]
    ) -> Generator[list[TextOutputs] | None]:
        """Compute outputs in steps: yield None after each, and finally the rows' outputs."""


class RerankEngine(RowEngine, Protocol):
    """The computations of one reranker. `score` runs on the lane."""

    @property
    def max_tokens(self) -> int:
        """Return the most tokens of a pair, special tokens included."""

    def encode_pairs(
        self,
        query: str,
        documents: Sequence[str],
        *,
        max_document_tokens: int | None = None,
        instruction: str | None = None,
    ) -> list[Pair]:
        """Tokenize the query with each document, cut to fit.

        `instruction` is ignored unless the model's prompt has a place for one. Raises
        ContextLengthExceeded for a query that leaves no room for a document's token.
        """

    def score(self, rows: Sequence[Pair]) -> Vectors:
        """Return the logits, (rows, labels) float32."""

    def in_steps(self, rows: Sequence[Pair]) -> Generator[Vectors | None]:
        """Compute logits in steps: yield None after each, and finally the logits."""


class Tokens(Protocol):
    """A chat model's tokenizer. Safe on any thread."""

    @property
    def tokenizer(self) -> Any:
        """Return the tokenizer of transformers."""

    def tokenize(self, job: GenerateJob, *, special: bool, asking: bool) -> list[int]:
        """Return the token ids of the job's text or conversation.

        `special` adds special tokens to a text, and `asking` the beginning of the model's answer to
        a conversation. Raises BadRequest for a conversation that the template refuses.
        """

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the vocabulary's string for each id, or an empty one for an unknown id."""

    def decode(self, ids: Sequence[int]) -> str: ...


class PrefixCache(Protocol):
    """A chat model's prefix cache, as prefix files use it on the lane."""

    @property
    def pool_bytes(self) -> int:
        """Return the bytes of the pool, which several models may share."""

    def pieces(self, adapter: int) -> Sequence[PrefixPiece]:
        """Return an adapter's cached KV as pieces, each after the pieces that it continues."""

    def copy_piece(self, adapter: int, piece: PrefixPiece) -> bytes | None:
        """Return a piece's content; None if a part of it has been evicted."""

    def put_piece(self, adapter: int, salt: str, content: bytes) -> bool:
        """Put a piece's content into the cache; return False if there is no room.

        May raise any error for content that `copy_piece` has not returned for this model.
        """


class GenerationEngine(Protocol):
    """The computations of one chat model.

    Methods run on the lane unless stated otherwise. Any thread may read the properties, whose
    values stay the same while the model is loaded.
    """

    @property
    def facts(self) -> EngineFacts: ...

    @property
    def tokens(self) -> Tokens: ...

    @property
    def prefixes(self) -> PrefixCache | None:
        """Return the prefix cache; None for a model split over several processes."""

    @property
    def is_batched(self) -> bool:
        """Return True if sequences run together, and False if they run one at a time."""

    def prepare(self, job: GenerateJob) -> list[SequenceParams]:
        """Render and tokenize the prompt, and return one sequence per choice. Safe on any thread.

        Raises BadRequest for a conversation that the template refuses or an image that cannot be
        read, ContextLengthExceeded for a prompt that leaves no room for one token, and Overloaded
        or Unavailable if an image cannot be decoded now.
        """

    def compile(self, grammar: Grammar) -> Compiled:
        """Compile a grammar. Slow; safe on any thread. Raises BadRequest."""

    def matches_schema(self, schema: str, answer: str) -> bool | None:
        """Return whether an answer matches a JSON Schema; None if that cannot be found out.

        Slow; safe on any thread.
        """

    def read_answer(self, params: SequenceParams, text: str, is_cut: bool) -> Reading:
        """Parse a sequence's complete answer into thoughts, text and calls.

        Slow; safe on any thread. A cut answer has no calls. If parsing fails, the answer stays
        text, and a log event is returned. Raises Overloaded or Unavailable if other work leaves no
        time for parsing.
        """

    def step(self, plan: StepPlan) -> StepResult:
        """Change the batch as planned, then run a pass.

        Sequences of a failed pass are prefilled again. If a sequence fails alone or cannot join,
        its delta has the error.
        """

    def synchronize(self) -> None: ...

    def self_test(self) -> Generator[Verdict]:
        """Compare sequences in batches and alone; each step yields the verdict so far, and the last
        one a complete verdict.
        """

    def time_step(self, rows: int) -> Generator[float | None]:
        """Time a decode step of `rows` sequences; only the last step yields seconds."""

    def apply_verdict(self, verdict: Verdict) -> None:
        """Stop running sequences in the ways that the verdict found wrong.

        Before its first complete verdict, an engine of an unknown architecture runs one sequence
        at a time.
        """

    def probe(self) -> None:
        """Prefill a fixed prompt without compiling anything. Raises the device's errors."""

    def routing_keys(self, adapter: int = 0) -> Sequence[bytes]:
        """Return the routing keys of the prompts in the prefix cache. Safe on any thread."""

    def drop_adapter(self, number: int) -> None:
        """Free an adapter, and end its sequences."""

    def nbytes(self) -> int:
        """Return the bytes held on the device: weights, KV and prefix cache."""

    def close(self) -> None:
        """Free every array."""
