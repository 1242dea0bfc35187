"""The requests and answers of Cohere's /v2/embed and /v1/embed.

Source: https://docs.cohere.com/reference/embed and the types of cohere-python 5.21.
"""

import base64
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

import numpy as np
import numpy.typing as npt
import orjson
from pydantic import Field
from typing_extensions import TypedDict

from gateway.errors import BadRequest, ErrorBody
from gateway.jobs import Caller
from gateway.jobs.embed import Embedded, EmbedJob, Output
from gateway.wire.bounds import FAIL_FAST, Label
from gateway.wire.embeddings import NUMBER_BYTES, unit_rows, write_array
from gateway.wire.validation import MAX_INPUTS, CharBounds, Part, Request

EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
# The names that models' files give to the prompt of an input type.
PROMPT_NAMES: Final[Mapping[str, Sequence[str]]] = {
    "search_query": ("query", "search_query", "retrieval.query"),
    "search_document": ("document", "passage", "search_document", "retrieval.passage"),
    "classification": ("classification", "Classification"),
    "clustering": ("clustering", "Clustering", "separation"),
}
INT8_REACH: Final = 12  # the root mean squares of a vector's numbers that int8 reaches
_Text = Annotated[str, Field(min_length=1)]
_SOME = Field(min_length=1, max_length=MAX_INPUTS)


class EmbedContent(Part):
    """A part of an input."""

    type: Literal["text"]
    text: _Text


class EmbedInput(Part):
    """An input in parts, which become the lines of one text."""

    content: Annotated[list[EmbedContent], FAIL_FAST, _SOME]


class CohereRequest(Request):
    """A request to Cohere's /v2/embed, or without `inputs` to /v1/embed."""

    kind = "embedding"
    number_bytes: ClassVar[int] = 2 * NUMBER_BYTES["float"]  # in all types at once
    copies: ClassVar[int] = 1
    params: ClassVar = {"prompt": "texts", "dimensions": "output_dimension", "output": "model"}
    harmless = frozenset({"priority"})
    refused: ClassVar = {"images": "Images are not embedded."}
    neutral: ClassVar = {"images": ([],)}
    example: ClassVar = {"texts": ["Hello!"], "input_type": "search_document"}

    model: Annotated[Label, Field(min_length=1)] | None = None
    texts: Annotated[list[_Text], FAIL_FAST, _SOME] | None = None
    inputs: Annotated[list[EmbedInput], FAIL_FAST, _SOME] | None = None
    input_type: (
        Literal["search_query", "search_document", "classification", "clustering"] | None
    ) = None
    embedding_types: Annotated[list[EmbeddingType], FAIL_FAST, _SOME] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = Field(None, alias="output_dimension")
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    side: Literal["NONE", "END"] = Field("END", alias="truncate")

    def choose_outputs(self, available: Sequence[Output]) -> tuple[Output, ...]:
        return ("dense",)


def to_job(
    request: CohereRequest, caller: Caller, *, prompt_name: str | None, bounds: CharBounds
) -> EmbedJob:
    """Return the job of a request, with `prompt_name` if it has no input type."""
    if (request.texts is None) == (request.inputs is None):
        raise BadRequest("Send either 'texts' or 'inputs'.", param="texts")
    lines = [[part.text for part in one.content] for one in request.inputs or ()]
    texts = request.texts or ["\n".join(parts) for parts in lines]
    bounds.check(texts, param="texts", noun="A text")
    kind = request.input_type
    return EmbedJob(
        caller=caller,
        texts=texts,
        truncate=request.side == "END",
        dimensions=request.dimensions,
        max_tokens=request.max_tokens,
        prompt_name=None if kind else prompt_name,
        prompt_names=PROMPT_NAMES[kind] if kind else None,
    )


class CohereEmbeddings(TypedDict):
    """The vectors of texts by type, or from version 1 as lists, and the texts."""

    id: str
    texts: Sequence[str]
    meta: dict[str, dict[str, str | int]]
    response_type: Literal["embeddings_floats", "embeddings_by_type"]
    embeddings: list[list[float]] | dict[EmbeddingType, list[list[float]] | list[str]]


def write_pieces(
    answer: Embedded, request: CohereRequest, texts: Sequence[str], version: str, *, name: str
) -> Iterator[bytes]:
    """Yield the JSON of Cohere's answer in pieces, with vectors scaled to length 1."""
    is_plain = version == "1" and request.embedding_types is None
    units: dict[str, str | int] = {"input_tokens": answer.prompt_tokens}
    empty: CohereEmbeddings = {
        "id": name,
        "texts": texts,
        "meta": {"api_version": {"version": version}, "billed_units": units},
        "response_type": "embeddings_floats" if is_plain else "embeddings_by_type",
        "embeddings": [],
    }
    vectors = unit_rows(answer.vectors)
    yield orjson.dumps(empty).removesuffix(b"[]}")
    kinds: Sequence[EmbeddingType] = request.embedding_types or ["float"]
    for index, kind in enumerate(dict.fromkeys(kinds)):
        if not is_plain:
            yield b'%s"%s":' % (b"," if index else b"{", kind.encode())
        yield from _write_type(vectors, kind)
    yield b"}" if is_plain else b"}}"


def _write_type(vectors: npt.NDArray[np.float32], kind: EmbeddingType) -> Iterator[bytes]:
    if kind == "base64":
        yield orjson.dumps([base64.b64encode(vector.tobytes()).decode() for vector in vectors])
    else:
        yield from write_array(quantize(vectors, kind), "float")


def quantize(vectors: npt.NDArray[np.float32], kind: EmbeddingType) -> npt.NDArray[Any]:
    """Return vectors of length 1 in another type.

    Bits are packed as in sentence-transformers, which Cohere's are too: 1 above zero, the first one
    highest, and signed bytes less 128. Neither publishes a scale for int8 that fits every model, so
    it depends on the size of vectors alone: vectors of different requests can be compared.
    """
    if kind == "float":
        return vectors
    if kind in ("binary", "ubinary"):
        packed: npt.NDArray[Any] = np.packbits(vectors > 0, axis=1).astype(np.int16)
        return packed - 128 * (kind == "binary")
    scale = 127 * max(1.0, math.sqrt(vectors.shape[1]) / INT8_REACH)
    numbers: npt.NDArray[Any] = np.clip(np.rint(vectors * scale), -127, 127).astype(np.int16)
    return numbers + 128 * (kind == "uint8")


class CohereErrorBody(ErrorBody):
    """An error in Cohere's format, with OpenAI's inside."""

    message: str
