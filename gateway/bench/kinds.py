"""The kinds of work that can be measured, and their defaults. Imports nothing heavy."""

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """A kind of work."""

    EMBEDDINGS = "embeddings"
    RERANK = "rerank"
    CHAT = "chat"
    STRUCTURED = "structured"
    LOGPROBS = "logprobs"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class Usual:
    """The defaults of a kind. `max_tokens` is None where nothing is generated."""

    model: str
    unit: str
    max_tokens: int | None = None
    texts: int = 1


EMBEDDER, WRITER = "text-embedding-3-small", "gpt-4o-mini"
USUAL = {
    Kind.EMBEDDINGS: Usual(EMBEDDER, "vectors"),
    Kind.RERANK: Usual(EMBEDDER, "pairs", texts=32),
    Kind.CHAT: Usual(WRITER, "tokens", 64),
    Kind.STRUCTURED: Usual(WRITER, "tokens", 256),
    Kind.LOGPROBS: Usual(WRITER, "tokens", 1),  # as rerankers ask: yes or no
}
PARTS = {
    Kind.MIXED: (Kind.EMBEDDINGS, Kind.CHAT, Kind.STRUCTURED),
    **{kind: (kind,) for kind in USUAL},
}
