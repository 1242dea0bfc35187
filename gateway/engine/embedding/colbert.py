"""ColBERT's settings, and its tokens: markers of queries and documents, and expanded queries.

Sources: PyLate, models/colbert.py; sentence-transformers, multi_vector_encoder/model.py.
"""

import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gateway.engine.embedding.pooling import Recipe
from gateway.engine.embedding.tokenizer import TextTokenizer
from gateway.engine.models.checkpoint import Checkpoint
from gateway.jobs import TokenIds

# Texts after a prompt: the tokens that come of it with each of them are the prompt's own.
_ENDS = ("a", "1", ".", "the")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings in a ColBERT's files that affect its tokens."""

    query: str
    document: str
    are_tokens: bool  # the markers are tokens after the first one; otherwise they begin the text
    query_length: int | None
    document_length: int | None
    expanded: int  # tokens to which queries are filled up, or 0
    attends: bool  # to the tokens that fill a query up
    filler: str | None = None  # the token that fills queries up; None: the mask
    skipped: Sequence[str]  # words whose vectors a document lacks


def read_settings(checkpoint: Checkpoint, recipe: Recipe) -> Settings:
    """Read the settings of colbert-ir, PyLate or sentence-transformers. Raises ModelLoadFailed."""
    inner = checkpoint.inside(recipe.transformer)
    with checkpoint.reading_config():
        if checkpoint.read_modules() is None:
            return _of_stanford(checkpoint.read_object("artifact.metadata"))
        saved = checkpoint.read_object("config_sentence_transformers.json")
        if recipe.head is None:
            return _of_pylate(saved)
        mask = checkpoint.inside(recipe.head).read_object("config.json")
        for key, served in (
            ("skiplist_tasks", (None, ["document"])),
            ("keep_only_token_ids", (None,)),
        ):
            if mask.get(key) not in served:
                raise checkpoint.failed(
                    f"{recipe.head}/config.json: {key} {mask[key]!r:.60} is not supported"
                )
        files = sorted(path.name for path in inner.folder.glob("sentence_*_config.json"))
        return _of_multi_vector_encoder(saved, inner.read_object(files[0]) if files else {}, mask)


def document_limit(settings: Settings) -> dict[str, int]:
    """Return the limit that replaces the one in sentence_bert_config.json."""
    length = settings.document_length
    return {} if length is None else {"max_seq_length": length}


def _of_stanford(saved: dict[str, Any]) -> Settings:
    return Settings(
        query=str(saved.get("query_token_id") or "[unused0]"),
        document=str(saved.get("doc_token_id") or "[unused1]"),
        are_tokens=True,
        query_length=int(saved.get("query_maxlen") or 32),
        document_length=int(saved.get("doc_maxlen") or 180),
        expanded=int(saved.get("query_maxlen") or 32),
        attends=bool(saved.get("attend_to_mask_tokens")),
        skipped=string.punctuation if saved.get("mask_punctuation", True) else "",
    )


def _of_pylate(saved: dict[str, Any]) -> Settings:
    length = int(saved.get("query_length") or 32)
    is_expanded = saved.get("do_query_expansion") is not False
    query, document, skipped = (
        saved.get(k) for k in ("query_prefix", "document_prefix", "skiplist_words")
    )
    return Settings(
        query="[Q] " if query is None else str(query),
        document="[D] " if document is None else str(document),
        are_tokens=True,
        query_length=length,
        document_length=int(saved.get("document_length") or 180),
        expanded=length if is_expanded else 0,
        attends=is_expanded and bool(saved.get("attend_to_expansion_tokens")),
        skipped=string.punctuation if skipped is None else skipped,
    )


def _of_multi_vector_encoder(
    saved: dict[str, Any], transformer: dict[str, Any], mask: dict[str, Any]
) -> Settings:
    prompts, expansion = saved.get("prompts") or {}, transformer.get("query_expansion") or {}
    expanded, query_length = int(expansion.get("length") or 0), transformer.get("query_length")
    if expansion.get("strategy") == "fixed":
        query_length = expanded
    elif query_length is not None:
        query_length = max(int(query_length), expanded)
    return Settings(
        query=prompts.get("query") or "",
        document=prompts.get("document") or "",
        are_tokens=False,
        query_length=query_length,
        document_length=transformer.get("document_length"),
        expanded=expanded,
        attends=bool(expansion.get("attend")),
        filler=expansion.get("token"),
        skipped=mask.get("skiplist_words") or (),
    )


@dataclass(frozen=True, slots=True)
class MarkedTokenizer:
    """A tokenizer for queries and documents, which tells them apart by their first tokens.

    Safe on any thread.
    """

    plain: TextTokenizer
    settings: Settings
    query: tuple[int, ...]  # the markers' tokens
    document: tuple[int, ...]
    query_length: int
    filler: int
    skipped: tuple[int, ...]

    @property
    def has_patterns(self) -> bool:
        return self.plain.has_patterns

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return documents' ids, not truncated, with special tokens."""
        return self._mark(
            self.plain.encode(self._begin(texts, self.settings.document)), self.document
        )

    def encode_start(self, texts: Sequence[str], limit: int) -> list[list[int]]:
        texts = self._begin(texts, self.settings.document)
        return self._mark(self.plain.encode_start(texts, limit), self.document)

    def encode_query(self, texts: Sequence[str]) -> list[list[int]]:
        """Return queries' ids, not truncated, but filled up to the length of expanded ones."""
        rows = self._mark(self.plain.encode(self._begin(texts, self.settings.query)), self.query)
        return [[*row, *[self.filler] * (self.settings.expanded - len(row))] for row in rows]

    def truncate(self, ids: TokenIds, limit: int) -> list[int]:
        marker = tuple(ids[1:2])
        if not self.settings.are_tokens or marker not in (self.query, self.document):
            return self.plain.truncate(ids, limit)
        first, *rest = self.plain.truncate([*ids[:1], *ids[2:]], limit - 1)
        return [first, *marker, *rest]

    def attended(self, ids: TokenIds) -> int:
        """Return how many of a row's first tokens its other tokens see."""
        length = len(ids)
        if self.settings.expanded and not self.settings.attends and self._is_query(ids):
            while length > 1 and ids[length - 1] == self.filler:
                length -= 1
        return length

    def kept(self, ids: TokenIds) -> npt.NDArray[np.bool_]:
        """Return which of a row's tokens have a vector: all of a query."""
        return np.full(len(ids), True) if self._is_query(ids) else ~np.isin(ids, self.skipped)

    def _is_query(self, ids: TokenIds) -> bool:
        start = 1 if self.settings.are_tokens else self.plain._before
        return tuple(ids[start : start + len(self.query)]) == self.query

    def _begin(self, texts: Sequence[str], prompt: str) -> Sequence[str]:
        return texts if self.settings.are_tokens else [prompt + text for text in texts]

    def _mark(self, rows: list[list[int]], marker: tuple[int, ...]) -> list[list[int]]:
        if not self.settings.are_tokens:
            return rows
        return [[*row[:1], *marker, *row[1:]] for row in rows]


def mark(
    inner: Checkpoint, plain: TextTokenizer, settings: Settings, max_tokens: int
) -> MarkedTokenizer:
    """Add a ColBERT's markers to its tokenizer. Raises ModelLoadFailed."""
    markers: list[tuple[int, ...]] = []
    for prompt in (settings.query, settings.document):
        if settings.are_tokens and prompt:
            token = plain.token_id(prompt)
            if token is None:
                raise inner.failed(f"its marker {prompt!r:.60} is no token of its tokenizer")
            markers.append((token,))
        else:
            rows = plain.encode([prompt + end for end in _ENDS], with_specials=False)
            alike = [len(set(ids)) == 1 for ids in zip(*rows, strict=False)]
            markers.append(tuple(rows[0][: (*alike, False).index(False)]))
    query, document = markers
    skipped = [plain.token_id(word) for word in settings.skipped]
    if (settings.expanded or skipped) and (not document or document[: len(query)] == query):
        raise inner.failed(
            f"its documents may begin as its queries do ({settings.query!r:.60}), which would be "
            "computed as queries then"
        )
    query_length = settings.query_length or max_tokens
    filler = plain.token_id(settings.filler or _mask_token(inner))
    if settings.expanded and filler is None:
        raise inner.failed("its queries are filled up with a token that its tokenizer lacks")
    if not 4 <= query_length <= max_tokens or settings.expanded > query_length:
        raise inner.failed(
            f"its queries have {query_length} tokens, where its inputs have at most {max_tokens}"
        )
    ids = tuple(token for token in skipped if token is not None)
    return MarkedTokenizer(plain, settings, query, document, query_length, filler or 0, ids)


def _mask_token(inner: Checkpoint) -> str:
    files = ("special_tokens_map.json", "tokenizer_config.json")
    stated = {k: v for file in files for k, v in inner.read_object(file).items()}
    token = stated.get("mask_token")
    return str(token.get("content") if isinstance(token, dict) else token)
