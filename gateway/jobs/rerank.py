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
    # Tokens cut off the document's end; more are missing if the document was not encoded whole.
    cut: int = 0

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankJob:
    """Documents to score by how well each answers the query."""

    caller: Caller
    documents: Sequence[str]
    query: str = ""
    queries: Sequence[str] = ()  # one for each document, instead of `query`
    max_tokens_per_doc: int | None = None  # documents are cut to this length
    # True: documents are cut to the model's limit. False: longer documents are refused.
    truncate: bool = True
    # True: scores are the model's raw values. False: they are between 0 and 1.
    is_raw: bool = False
    # The prompt to use if an embedding model names none for queries or documents.
    prompt_name: str | None = None
    instruction: str | None = None  # used only by models that take an instruction
    max_numbers: int | None = None  # the most numbers that multi-vectors may have together


@dataclass(frozen=True, slots=True)
class Reranked:
    """The answer to a `RerankJob`."""

    # Shape (documents,), in their order. In float32, the best scores would be equal.
    scores: npt.NDArray[np.float64]
    prompt_tokens: int
    truncated: int  # texts that were cut
