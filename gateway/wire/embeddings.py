"""POST /v1/embeddings, and TEI's /embed: request → EmbedJob; vectors → JSON."""

import base64
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, cast

import numpy as np
import orjson
from pydantic import Field
from typing_extensions import TypeAliasType, TypedDict

from gateway.errors import BadRequest
from gateway.jobs import Caller, TokenIds
from gateway.jobs.embed import Embedded, EmbedJob
from gateway.wire.bounds import Label
from gateway.wire.validation import CharBounds, Inputs, Request

PIECE_FLOATS = 65_536
# The most bytes of a float32: -1.1754944e-38 and a comma, or in base64 four thirds of four.
NUMBER_BYTES = {"float": 16, "base64": 6}


class EmbedRequest(Request):
    """A request for vectors; `field` names the field with the inputs."""

    field: ClassVar[Literal["input", "inputs"]]
    kind = "embedding"

    dimensions: Annotated[int, Field(ge=1)] | None = None
    truncate: bool | None = None  # TEI's field: cut a text that is too long, or refuse it
    prompt_name: Label | None = None  # name of a prompt of the model, put before each text

    @property
    def rows(self) -> list[Any]:
        """Return the inputs: texts, or rows of token ids."""
        rows: list[Any] = getattr(self, self.field)
        return rows


class EmbeddingsRequest(EmbedRequest):
    """A request to OpenAI's endpoint, with TEI's `truncate` and a `prompt_name`."""

    field = "input"
    params: ClassVar = {"prompt": "input"}
    harmless = frozenset({"user"})
    example: ClassVar = {"input": ["Hello!"]}

    model: Annotated[Label, Field(min_length=1)]
    input: Inputs
    encoding_format: Literal["float", "base64"] = "float"


class InputsRequest(EmbedRequest):
    """A request to TEI's /embed; without a model, the one at hand answers."""

    field = "inputs"
    params: ClassVar = {"prompt": "inputs"}
    encoding_format: ClassVar[Literal["float"]] = "float"
    example: ClassVar = {"inputs": ["Hello!"]}
    refused: ClassVar = {
        "normalize": "Vectors are of length 1 here; /v1/embeddings gives those that a model's own "
        "files describe.",
        "truncation_direction": "Texts are cut at their end.",
    }
    neutral: ClassVar = {"normalize": (True,), "truncation_direction": ("right", "Right")}

    model: Annotated[Label, Field(min_length=1)] | None = None
    inputs: Inputs


def to_job(
    request: EmbedRequest,
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
    if isinstance(request.rows[0], str):
        texts = request.rows
        bounds.check(texts, param=request.field, noun="An input")
    elif accepts_ids:
        token_rows = request.rows
    else:
        raise BadRequest(
            "This model takes texts, not token ids: they would be another tokenizer's. With "
            "LangChain, set check_embedding_ctx_length=False; or say `token_ids: accept` in "
            "models.yaml if they are this model's own.",
            param=request.field,
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


def usage_dict(prompt_tokens: int) -> EmbeddingUsage:
    return {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}


class Embeddings(TypedDict):
    """A vector for every input, in order."""

    id: str
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


Vectors = TypeAliasType("Vectors", list[list[float]])  # TEI's answer


class PoolingInfo(TypedDict):
    """How a model pools the vectors of tokens, if models.yaml says so."""

    pooling: str | None


class EmbeddingInfo(TypedDict):
    """The kind of model, in TEI's words."""

    embedding: PoolingInfo


class Info(TypedDict):
    """The embedding model that answers /embed, in TEI's words; null where it is not loaded."""

    model_id: str
    model_type: EmbeddingInfo
    max_input_length: int | None
    max_client_batch_size: int
    auto_truncate: bool
    version: str


def write_vectors(answer: Embedded) -> Iterator[bytes]:
    """Yield TEI's JSON in pieces: the vectors alone, each of length 1."""
    vectors = np.ascontiguousarray(answer.vectors, dtype="<f4")
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors = vectors / np.maximum(lengths, np.finfo("<f4").tiny)
    rows = max(1, PIECE_FLOATS // vectors.shape[1])
    for start in range(0, len(vectors), rows):
        piece = orjson.dumps(vectors[start : start + rows], option=orjson.OPT_SERIALIZE_NUMPY)
        yield (b"," if start else b"[") + piece[1:-1]
    yield b"]"


def write_pieces(answer: Embedded, *, name: str, model: str, encoding: str) -> Iterator[bytes]:
    """Yield the answer's JSON in pieces, each written within a few milliseconds."""
    # OpenAI's SDKs read base64 as little-endian float32.
    vectors = np.ascontiguousarray(answer.vectors, dtype="<f4")
    rows = max(1, PIECE_FLOATS // vectors.shape[1])
    usage = usage_dict(answer.prompt_tokens)
    empty = Embeddings(id=name, object="list", data=[], model=model, usage=usage)
    before, after = orjson.dumps(empty).split(b"[]", 1)
    yield before + b"["
    for start in range(0, len(vectors), rows):
        data: list[Embedding] = [
            {
                "object": "embedding",
                "index": index,
                # orjson writes an array as a list of its numbers.
                "embedding": _base64(vector) if encoding == "base64" else cast(list[float], vector),
            }
            for index, vector in enumerate(vectors[start : start + rows], start)
        ]
        piece = orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
        yield b"," + piece if start else piece
    yield b"]" + after


def _base64(vector: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(vector.tobytes()).decode("ascii")
