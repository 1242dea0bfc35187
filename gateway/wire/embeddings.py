"""POST /v1/embeddings: request → EmbedJob; vectors → JSON."""

import base64
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, cast

import numpy as np
import orjson
from pydantic import Field, WithJsonSchema, field_validator
from typing_extensions import TypedDict

from gateway.errors import BadRequest
from gateway.errors import Part as ErrorPart
from gateway.jobs import Caller, Embedded, EmbedJob, TokenIds
from gateway.wire.bounds import Label
from gateway.wire.validation import INPUTS_SCHEMA, MAX_INPUTS, CharBounds, Request, read_inputs

PIECE_FLOATS = 65_536
_INVALID = (
    f"'$.input' is invalid. It must be a string, an array of 1 to {MAX_INPUTS} non-empty strings, "
    "an array of token ids, or an array of such arrays"
)


class EmbeddingsRequest(Request):
    """What OpenAI's endpoint takes, and TEI's `truncate` and a `prompt_name` besides."""

    harmless = frozenset({"user"})
    kind = "embedding"
    example: ClassVar = {"input": ["Hello!"]}

    model: Annotated[Label, Field(min_length=1)]
    input: Annotated[Any, WithJsonSchema(INPUTS_SCHEMA)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    truncate: bool | None = None
    prompt_name: Label | None = None

    def param_of(self, part: ErrorPart) -> str:
        """Return the field that a part of the job came from."""
        return "input" if part == "prompt" else part

    @field_validator("input")
    @classmethod
    def _read_input(cls, value: object) -> object:
        try:
            return read_inputs(value)
        except ValueError as error:
            raise ValueError(f"{_INVALID}; {error}") from None


def to_job(
    request: EmbeddingsRequest,
    caller: Caller,
    *,
    accepts_ids: bool,
    truncate: bool,
    dimensions: int | None,
    prompt_name: str | None,
    bounds: CharBounds,
) -> EmbedJob:
    """Return the job of a request. Raises BadRequest for token ids if the model takes none."""
    texts: list[str] = []
    token_rows: list[TokenIds] = []
    if isinstance(request.input[0], str):
        texts = request.input
        bounds.check(texts, param="input", noun="An input")
    elif accepts_ids:
        token_rows = request.input
    else:
        raise BadRequest(
            "This model takes texts, not token ids: they would be another tokenizer's. With "
            "LangChain, set check_embedding_ctx_length=False; or say `token_ids: accept` in "
            "models.yaml if they are this model's own.",
            param="input",
        )
    return EmbedJob(
        caller=caller,
        texts=texts,
        token_rows=token_rows,
        truncate=truncate,
        dimensions=dimensions,
        prompt_name=prompt_name,
    )


class Embedding(TypedDict):
    """The vector of one input: numbers, or base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(TypedDict):
    """Tokens read."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(TypedDict):
    """A vector for every input, in order."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


def write_pieces(answer: Embedded, model: str, encoding: str) -> Iterator[bytes]:
    """Yield the answer's JSON in pieces, each written within a few milliseconds.

    base64 is little-endian float32, which is what OpenAI's SDKs read.
    """
    vectors = np.ascontiguousarray(answer.vectors, dtype="<f4")
    rows = max(1, PIECE_FLOATS // vectors.shape[1])
    usage: EmbeddingUsage = {
        "prompt_tokens": answer.prompt_tokens,
        "total_tokens": answer.prompt_tokens,
    }
    empty: Embeddings = {"object": "list", "data": [], "model": model, "usage": usage}
    before, after = orjson.dumps(empty).split(b"[]", 1)
    yield before + b"["
    for start in range(0, len(vectors), rows):
        data: list[Embedding] = [
            {
                "object": "embedding",
                "index": index,
                # orjson writes an array as it would a list of its numbers.
                "embedding": _base64(vector) if encoding == "base64" else cast(list[float], vector),
            }
            for index, vector in enumerate(vectors[start : start + rows], start)
        ]
        piece = orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
        yield b"," + piece if start else piece
    yield b"]" + after


def _base64(vector: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(vector.tobytes()).decode("ascii")
