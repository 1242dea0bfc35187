"""Jobs of rerank models."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gateway.jobs import Caller, TokenIds


@dataclass(frozen=True, slots=True)
class Pair:
    """A query and a document as one row of token ids."""

    ids: TokenIds
    second: int  # the index at which the document begins
    # Tokens cut off its end, or fewer: a long document is not encoded whole.
    cut: int = 0

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankJob:
    """Documents to score by how well each answers the query."""

    caller: Caller
    documents: Sequence[str]
    query: str = ""
    queries: Sequence[str] = ()  # in place of `query`, one for each document
    max_tokens_per_doc: int | None = None  # which documents are cut to
    # Documents are cut to what the model can read, too; else such are refused.
    truncate: bool = True
    # A score is the model's own, not one between 0 and 1.
    is_raw: bool = False
    # Of an embedding model, where it has no prompt for queries or for documents.
    prompt_name: str | None = None
    instruction: str | None = None  # for models whose prompt has one


@dataclass(frozen=True, slots=True)
class Reranked:
    """The answer to a `RerankJob`."""

    # (documents,) in the order of the documents; as float32 the best would be equal.
    scores: npt.NDArray[np.float64]
    prompt_tokens: int
    truncated: int  # texts that were cut
