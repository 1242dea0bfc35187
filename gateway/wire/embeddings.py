"""The requests and answers of POST /v1/embeddings, and of TEI's /embed."""

import base64
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, cast

import numpy as np
import numpy.typing as npt
import orjson
from pydantic import Field
from typing_extensions import TypeAliasType, TypedDict

from gateway.errors import BadRequest
from gateway.jobs import Caller, TokenIds
from gateway.jobs.embed import Embedded, EmbedJob
from gateway.wire.bounds import Label
from gateway.wire.validation import CharBounds, Inputs, Request

PIECE_FLOATS = 65_536
# The most bytes that a float32 takes in an answer, such as `-1.1754944e-38,` as text.
NUMBER_BYTES = {"float": 16, "base64": 6}


class EmbedRequest(Request):
    """The fields that all requests for embeddings have."""

    field: ClassVar[Literal["input", "inputs"]]
    kind = "embedding"

    dimensions: Annotated[int, Field(ge=1)] | None = None
    truncate: bool | None = None  # TEI's field: cut a text that is too long, or refuse it
    prompt_name: Label | None = None  # the name of a model's prompt to put before each text

    @property
    def rows(self) -> list[Any]:
        """Return the inputs: texts, or rows of token ids."""
        rows: list[Any] = getattr(self, self.field)
        return rows


class EmbeddingsRequest(EmbedRequest):
    """A request to OpenAI's endpoint."""

    field = "input"
    params: ClassVar = {"prompt": "input"}
    harmless = frozenset({"user"})
    example: ClassVar = {"input": ["Hello!"]}

    model: Annotated[Label, Field(min_length=1)]
    input: Inputs
    encoding_format: Literal["float", "base64"] = "float"

    @property
    def number_bytes(self) -> int:
        return NUMBER_BYTES[self.encoding_format]


class InputsRequest(EmbedRequest):
    """A request to TEI's /embed."""

    field = "inputs"
    params: ClassVar = {"prompt": "inputs"}
    number_bytes: ClassVar[int] = NUMBER_BYTES["float"]
    example: ClassVar = {"inputs": ["Hello!"]}
    refused: ClassVar = {
        "normalize": "Vectors have length 1 here; /v1/embeddings returns them as the model's files "
        "describe.",
        "truncation_direction": "Texts are cut at their end.",
        "images": "Images are not embedded.",
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
    """Return the job of a request. Raises BadRequest for token ids unless `accepts_ids`."""
    texts: list[str] = []
    token_rows: list[TokenIds] = []
    if isinstance(request.rows[0], str):
        texts = request.rows
        bounds.check(texts, param=request.field, noun="An input")
    elif accepts_ids:
        token_rows = request.rows
    else:
        raise BadRequest(
            "This model takes texts, not token ids, which may come from another tokenizer. With "
            "LangChain, set check_embedding_ctx_length=False; or, if the ids are this model's own, "
            "set `token_ids: accept` in models.yaml.",
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
    """The vector of one input, as numbers or as base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(TypedDict):
    """The number of tokens read."""

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


Vectors = TypeAliasType("Vectors", list[list[float]])


class PoolingInfo(TypedDict):
    """How a model pools its token vectors, or null if models.yaml doesn't say."""

    pooling: str | None


class EmbeddingInfo(TypedDict):
    """The kind of model, in TEI's format."""

    embedding: PoolingInfo


class Info(TypedDict):
    """The embedding model that answers /embed."""

    model_id: str
    model_type: EmbeddingInfo
    max_input_length: int | None  # null until the model is loaded
    max_client_batch_size: int
    auto_truncate: bool
    version: str


def write_vectors(answer: Embedded) -> Iterator[bytes]:
    """Yield the JSON of TEI's answer in pieces, with vectors scaled to length 1."""
    return write_rows(unit_rows(answer.vectors))


def unit_rows(vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return little-endian vectors scaled to length 1."""
    vectors = np.ascontiguousarray(vectors, dtype="<f4")
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled: npt.NDArray[np.float32] = vectors / np.maximum(lengths, np.finfo("<f4").tiny)
    return scaled


def write_rows(numbers: npt.NDArray[Any]) -> Iterator[bytes]:
    """Yield the JSON of a table of numbers in pieces, which take a few milliseconds each."""
    rows = max(1, PIECE_FLOATS // numbers.shape[1])
    for start in range(0, len(numbers), rows):
        piece = orjson.dumps(numbers[start : start + rows], option=orjson.OPT_SERIALIZE_NUMPY)
        yield (b"," if start else b"[") + piece[1:-1]
    yield b"]"


def write_pieces(answer: Embedded, *, name: str, model: str, encoding: str) -> Iterator[bytes]:
    """Yield the JSON of OpenAI's answer in pieces, which take a few milliseconds each."""
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
