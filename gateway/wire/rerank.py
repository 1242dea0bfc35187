"""The requests and answers of /v1/rerank and /v1/score."""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Annotated, ClassVar, Final, Literal, NotRequired

import numpy as np
from pydantic import BeforeValidator, Field, WithJsonSchema
from typing_extensions import TypeAliasType, TypedDict

from gateway.errors import (
    BadRequest,
    EncodingNotSupported,
    GatewayError,
    ModelNotFound,
    Overloaded,
    Unavailable,
)
from gateway.jobs import Caller
from gateway.jobs.rerank import Reranked, RerankJob
from gateway.wire.bounds import FAIL_FAST, INNER_DEPTH, Label, parse
from gateway.wire.embeddings import EmbeddingUsage, usage_dict
from gateway.wire.validation import MAX_INPUTS, CharBounds, Part, Request

_TEXT: Final = {"type": "string", "minLength": 1}
_TEXTS: Final = {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_INPUTS}
_DOCUMENT: Final = {"type": "object", "properties": {"text": _TEXT}, "required": ["text"]}
_DOCUMENTS: Final = {**_TEXTS, "items": {"anyOf": [_TEXT, _DOCUMENT]}}


class TextDocument(Part):
    """A document that is an object, not a string."""

    text: str


_Texts = Annotated[list[str], Field(max_length=MAX_INPUTS), FAIL_FAST]
_TextDocuments = Annotated[list[str | TextDocument], Field(max_length=MAX_INPUTS), FAIL_FAST]


def _read_flag(value: object) -> object:
    # RAGFlow sends the strings "true" and "false".
    return value == "true" if value in ("true", "false") else value


Flag = Annotated[
    bool,
    BeforeValidator(_read_flag),
    WithJsonSchema({"anyOf": [{"type": "boolean"}, {"enum": ["true", "false"]}]}),
]
Text = Annotated[str, WithJsonSchema(_TEXT)]
Texts = Annotated[_Texts, WithJsonSchema(_TEXTS)]
OneOrMoreTexts = Annotated[str | _Texts, WithJsonSchema({"anyOf": [_TEXT, _TEXTS]})]
Documents = Annotated[str | _TextDocuments, WithJsonSchema({"anyOf": [_TEXT, _DOCUMENTS]})]


class Empty(BadRequest):
    """The error for an empty query, document or list of documents."""


class ScoringRequest(Request):
    """The fields that all requests for scores have."""

    harmless = frozenset({"user", "priority", "rank_fields"})
    kind = "rerank"
    params: ClassVar = {"prompt": "query", "documents": "documents"}

    model: Annotated[Label, Field(min_length=1)] | None = None
    max_tokens_per_doc: Annotated[int, Field(ge=0)] | None = None
    instruction: str | None = None
    truncate: bool | None = None
    raw_scores: bool = False
    use_activation: bool = True

    def texts_of(self, part: Literal["prompt", "documents"]) -> list[str]:
        value = getattr(self, self.params[part])
        if isinstance(value, str):
            return [value]
        return [getattr(document, "text", document) for document in value]


class RerankRequest(ScoringRequest):
    """A request in the format of Cohere, Jina, vLLM, infinity and llama.cpp."""

    example: ClassVar = {
        "query": "What is the capital of France?",
        "documents": ["Paris is the capital of France.", "Bananas are yellow."],
    }

    query: Text
    documents: Documents
    top_n: Annotated[int, Field(ge=0)] | None = None
    return_documents: Flag = False


class TextsRequest(ScoringRequest):
    """A request to TEI's /rerank."""

    example: ClassVar = {
        "query": "What is the capital of France?",
        "texts": ["Paris is the capital of France.", "Bananas are yellow."],
    }
    refused: ClassVar = {"truncation_direction": "Texts are cut at their end."}
    neutral: ClassVar = {"truncation_direction": ("right", "Right")}
    params: ClassVar = {"prompt": "query", "documents": "texts"}

    query: Text
    texts: Texts
    return_text: bool = False


class ScoreRequest(ScoringRequest):
    """A request to vLLM's /v1/score."""

    example: ClassVar = {
        "text_1": "What is the capital of France?",
        "text_2": ["Paris is the capital of France.", "Bananas are yellow."],
    }
    params: ClassVar = {"prompt": "text_1", "documents": "text_2"}

    text_1: OneOrMoreTexts  # one text, or as many as `text_2` has
    text_2: OneOrMoreTexts


def to_job(
    request: ScoringRequest,
    caller: Caller,
    *,
    max_tokens_per_doc: int | None,
    prompt_name: str | None,
    bounds: CharBounds,
) -> RerankJob:
    """Return the job of a request, with the model's defaults for fields that it leaves out.

    Raises BadRequest for an empty text, and for texts that are too many or too long.
    """
    queries, documents = request.texts_of("prompt"), request.texts_of("documents")
    field, documents_field = request.params["prompt"], request.params["documents"]
    for texts, param in ((queries, field), (documents, documents_field)):
        _refuse_empty(texts, param, is_list=not isinstance(getattr(request, param), str))
        bounds.check(texts, param=param, noun="A text")
    if len(queries) not in (1, len(documents)):
        raise BadRequest(
            f"'{field}' should be one text, or as many as '{documents_field}' has: "
            f"{len(documents)}, not {len(queries)}.",
            param=field,
        )
    return RerankJob(
        caller=caller,
        query=queries[0],
        queries=queries if len(queries) > 1 else (),
        documents=documents,
        max_tokens_per_doc=request.max_tokens_per_doc or max_tokens_per_doc,
        truncate=request.truncate is not False,
        is_raw=request.raw_scores or not request.use_activation,
        prompt_name=prompt_name,
        instruction=request.instruction or None,
    )


def _refuse_empty(texts: Sequence[str], field: str, *, is_list: bool) -> None:
    if texts and all(texts):
        return
    place = f"{field}[{list(texts).index('')}]" if texts and is_list else field
    raise Empty(f"Invalid '{place}': it should not be empty.", param=place, code="invalid_value")


class RerankedDocument(TypedDict):
    """A document as it was sent."""

    text: str


class RerankResult(TypedDict):
    """A document's score, and the document's position in the request."""

    index: int
    relevance_score: float
    document: NotRequired[RerankedDocument]


class BilledUnits(TypedDict):
    """The units that Cohere would bill."""

    search_units: int


class RerankTokens(TypedDict):
    """The number of tokens read, in Cohere's format."""

    input_tokens: int
    output_tokens: int


class RerankMeta(TypedDict):
    """The metadata of an answer, in Cohere's format."""

    billed_units: BilledUnits
    tokens: RerankTokens


class Reranking(TypedDict):
    """The documents' scores, best first."""

    id: str
    object: Literal["list"]
    model: str
    results: list[RerankResult]
    usage: EmbeddingUsage
    meta: RerankMeta


def write_reranking(
    answer: Reranked, request: RerankRequest, *, name: str, model: str
) -> Reranking:
    results: list[RerankResult] = []
    documents = request.texts_of("documents")
    for index in _best_first(answer)[: request.top_n or None]:
        result: RerankResult = {"index": index, "relevance_score": float(answer.scores[index])}
        if request.return_documents:
            result["document"] = {"text": documents[index]}
        results.append(result)
    return {
        "id": name,
        "object": "list",
        "model": model,
        "results": results,
        "usage": usage_dict(answer.prompt_tokens),
        "meta": {
            "billed_units": {"search_units": 1},
            "tokens": {"input_tokens": answer.prompt_tokens, "output_tokens": 0},
        },
    }


class RankedText(TypedDict):
    """A text's score in TEI's format, and the text's position in the request."""

    index: int
    score: float
    text: NotRequired[str]


RankedTexts = TypeAliasType("RankedTexts", list[RankedText])


def write_ranked_texts(answer: Reranked, request: TextsRequest) -> list[RankedText]:
    results: list[RankedText] = []
    for index in _best_first(answer):
        result: RankedText = {"index": index, "score": float(answer.scores[index])}
        if request.return_text:
            result["text"] = request.texts[index]
        results.append(result)
    return results


class Score(TypedDict):
    """The score of one pair of texts."""

    index: int
    object: Literal["score"]
    score: float


class Scores(TypedDict):
    """The score of every pair of texts, in order."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage


def write_scores(answer: Reranked, *, name: str, created: int, model: str) -> Scores:
    data: list[Score] = [
        {"index": index, "object": "score", "score": score}
        for index, score in enumerate(answer.scores.tolist())
    ]
    return {
        "id": name,
        "object": "list",
        "created": created,
        "model": model,
        "data": data,
        "usage": usage_dict(answer.prompt_tokens),
    }


def _best_first(answer: Reranked) -> list[int]:
    order: list[int] = np.argsort(-answer.scores, kind="stable").tolist()
    return order


def is_texts(
    body: bytes | bytearray, max_depth: int = INNER_DEPTH, unless: str = "documents"
) -> bool:
    """Return True for a body with `texts` and without the field `unless`."""
    if b'"texts"' not in body:
        return False
    try:
        fields = parse(body, max_depth)
    except ValueError:  # invalid JSON is reported later
        return False
    if not isinstance(fields, dict):
        return False
    return fields.get("texts") is not None and fields.get(unless) is None


class TextsErrorBody(TypedDict):
    """An error in TEI's format."""

    error: str
    error_type: Literal["Unhealthy", "Backend", "Overloaded", "Validation", "Empty"]


TEXTS_ERROR_STATUSES: Final = (400, 415, 422, 424, 429, 503)


class TextsError(GatewayError):
    """An error with TEI's status and body."""

    def __init__(self, error: GatewayError) -> None:
        super().__init__(
            error.message, retry_after_s=error.retry_after_s, should_retry=error.should_retry
        )
        self.error_type: Literal["Unhealthy", "Backend", "Overloaded", "Validation", "Empty"]
        match error:
            case Empty() | BadRequest(code="array_below_min_length"):
                self.status, self.error_type = HTTPStatus.BAD_REQUEST, "Empty"
            case Overloaded():
                self.status, self.error_type = error.status, "Overloaded"
            case Unavailable():
                self.status, self.error_type = error.status, "Unhealthy"
            case EncodingNotSupported():
                self.status, self.error_type = error.status, "Validation"
            case BadRequest() | ModelNotFound() if error.code != "unsupported_model":
                self.status, self.error_type = HTTPStatus.UNPROCESSABLE_ENTITY, "Validation"
            case _:
                self.status, self.error_type = HTTPStatus.FAILED_DEPENDENCY, "Backend"

    def body(self) -> TextsErrorBody:  # type: ignore[override]
        return {"error": self.message, "error_type": self.error_type}
