"""The requests and answers of POST /v1/embeddings, TEI's /embed(_sparse) and vLLM's /pooling."""

import base64
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, NotRequired, cast

import numpy as np
import numpy.typing as npt
import orjson
from pydantic import Field
from typing_extensions import TypeAliasType, TypedDict

from gateway.errors import BadRequest
from gateway.ids import passing_id
from gateway.jobs import Caller, TokenIds
from gateway.jobs import Vectors as Matrix
from gateway.jobs.embed import Embedded, EmbedJob, Output
from gateway.wire.bounds import Label
from gateway.wire.validation import CharBounds, Inputs, Request

PIECE_FLOATS = 65_536
# The most bytes that a float32 takes in an answer, such as `-1.1754944e-38,` as text.
NUMBER_BYTES = {"float": 16, "base64": 6}
WEIGHT_BYTES = 48  # the same of a weight and its index
ENTRY_BYTES = 128  # the same of an input's entry without its numbers
_TASKS: Final[dict[str, Output]] = {"embed": "dense", "token_embed": "multi_vector"}


class EmbedRequest(Request):
    """The fields that all requests for embeddings have."""

    field: ClassVar[Literal["input", "inputs"]]
    kind = "embedding"
    # A client that names no output reads dense vectors, and a model without them refuses.
    outputs: ClassVar[tuple[Output, ...]] = ("dense",)

    dimensions: Annotated[int, Field(ge=1)] | None = None
    truncate: bool | None = None  # TEI's field: cut a text that is too long, or refuse it
    prompt_name: Label | None = None  # the name of a model's prompt to put before each text

    @property
    def number_bytes(self) -> int:
        """Return the most bytes that a number takes in the answer."""
        return NUMBER_BYTES[getattr(self, "encoding_format", "float")]

    @property
    def copies(self) -> int:
        """Return how many times the answer has a dense vector."""
        return 2 if getattr(self, "output", None) else 1

    @property
    def rows(self) -> list[Any]:
        """Return the inputs: texts, or rows of token ids."""
        rows: list[Any] = getattr(self, self.field)
        return rows

    def choose_outputs(self, available: Sequence[Output]) -> tuple[Output, ...]:
        """Return the outputs asked for, each once, of a model that has the `available` ones."""
        return self.outputs


class EmbeddingsRequest(EmbedRequest):
    """A request to OpenAI's endpoint."""

    field = "input"
    params: ClassVar = {"prompt": "input"}
    harmless = frozenset({"user"})
    example: ClassVar = {"input": ["Hello!"]}

    model: Annotated[Label, Field(min_length=1)]
    input: Inputs
    encoding_format: Literal["float", "base64"] = "float"
    output: Output | Annotated[list[Output], Field(min_length=1, max_length=3)] | None = None

    def choose_outputs(self, available: Sequence[Output]) -> tuple[Output, ...]:
        names = [self.output] if isinstance(self.output, str) else self.output
        return tuple(dict.fromkeys(names or self.outputs))

    def write(self, answer: Embedded, outputs: Sequence[Output], model: str) -> Iterator[bytes]:
        name, encoding = passing_id("embd"), self.encoding_format
        if self.output is None:
            return write_pieces(answer, name=name, model=model, encoding=encoding)
        return write_outputs(answer, outputs, name=name, model=model, encoding=encoding)


class InputsRequest(EmbedRequest):
    """A request to TEI's /embed."""

    field = "inputs"
    params: ClassVar = {"prompt": "inputs", "output": "model"}
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

    def write(self, answer: Embedded, outputs: Sequence[Output], model: str) -> Iterator[bytes]:
        return write_vectors(answer)


class SparseRequest(InputsRequest):
    """A request to TEI's /embed_sparse."""

    outputs = ("sparse",)
    refused: ClassVar = {
        "dimensions": "Sparse vectors have as many entries as they need.",
        "truncation_direction": "Texts are cut at their end.",
    }

    def write(self, answer: Embedded, outputs: Sequence[Output], model: str) -> Iterator[bytes]:
        return write_sparse(answer)


class PoolingRequest(EmbedRequest):
    """A request to vLLM's /pooling."""

    field = "input"
    params: ClassVar = {"prompt": "input", "output": "task"}
    harmless = frozenset({"user", "priority", "request_id"})
    example: ClassVar = {"input": ["Hello!"]}
    refused: ClassVar = {
        **dict.fromkeys(("messages", "data"), "Texts are sent as 'input'."),
        "dimensions": "POST /v1/embeddings shortens vectors.",
        **dict.fromkeys(("normalize", "use_activation"), "The model's files say how vectors end."),
        "add_special_tokens": "Texts get the special tokens of the model's tokenizer.",
        "truncate_prompt_tokens": "With `truncate: true`, texts are cut to the model's limit.",
        "truncation_side": "Texts are cut at their end.",
        "padding": "Texts are not padded.",
        **dict.fromkeys(("embed_dtype", "endianness"), "Base64 is of little-endian float32."),
    }
    neutral: ClassVar = {
        **dict.fromkeys(("use_activation", "add_special_tokens"), (True,)),
        "truncation_side": ("right",),
        "padding": ("do_not_pad",),
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
    }

    model: Annotated[Label, Field(min_length=1)] | None = None
    input: Inputs
    task: Literal["embed", "token_embed"] | None = None
    encoding_format: Literal["float", "base64"] = "float"

    def choose_outputs(self, available: Sequence[Output]) -> tuple[Output, ...]:
        """Return the task's output, or else the first that is an array."""
        arrays = [output for output in available if output in _TASKS.values()]
        chosen = arrays[0] if arrays else "dense"
        return (chosen if self.task is None else _TASKS[self.task],)

    def write(self, answer: Embedded, outputs: Sequence[Output], model: str) -> Iterator[bytes]:
        return write_pooled(answer, model=model, encoding=self.encoding_format)


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


class SparseEmbedding(TypedDict):
    """The weights above 0, and the token ids that they are for."""

    indices: list[int]
    values: list[float]


class Embedding(TypedDict):
    """The vectors of one input; arrays are lists, or base64 of little-endian float32, row by row.

    All but `embedding`, which is the dense vector, are there if `output` names them.
    """

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str  # an empty list if `output` does not name dense
    dense: NotRequired[list[float] | str]
    sparse: NotRequired[SparseEmbedding]
    multi_vector: NotRequired[list[list[float]] | str]
    multi_vector_shape: NotRequired[list[int]]  # tokens and dimensions, with base64


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


class Weight(TypedDict):
    """A token's weight in TEI's format."""

    index: int
    value: float


SparseVectors = TypeAliasType("SparseVectors", list[list[Weight]])


class PooledText(TypedDict):
    """The vector of one input, or those of its tokens, in vLLM's format."""

    index: int
    object: Literal["pooling"]
    data: list[float] | list[list[float]] | str
    data_shape: NotRequired[list[int]]  # tokens and dimensions, with base64


class Pooled(TypedDict):
    """What vLLM's /pooling answers: an entry for every input, in order."""

    id: str
    object: Literal["list"]
    created: int
    data: list[PooledText]
    model: str
    usage: EmbeddingUsage


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


def count_bytes(answer: Embedded, *, number_bytes: int, copies: int) -> int:
    """Return the most bytes that an answer takes as JSON, with as many copies of dense vectors."""
    numbers = copies * answer.vectors.size + sum(array.size for array in answer.multi_vector)
    weights = sum(len(vector.ids) for vector in answer.sparse)
    entries = len(answer.vectors) * ENTRY_BYTES
    return numbers * number_bytes + weights * WEIGHT_BYTES + entries


def write_sparse(answer: Embedded) -> Iterator[bytes]:
    """Yield the JSON of TEI's answer, a text at a time."""
    for index, vector in enumerate(answer.sparse):
        weights = zip(vector.ids.tolist(), vector.weights, strict=True)
        entry = [{"index": token, "value": weight} for token, weight in weights]
        yield (b"," if index else b"[") + orjson.dumps(entry, option=orjson.OPT_SERIALIZE_NUMPY)
    yield b"]"


def write_pooled(answer: Embedded, *, model: str, encoding: str) -> Iterator[bytes]:
    """Yield the JSON of vLLM's answer in pieces."""
    name, now, usage = passing_id("pool"), int(time.time()), usage_dict(answer.prompt_tokens)
    empty = Pooled(id=name, object="list", created=now, data=[], model=model, usage=usage)
    entries: list[dict[str, object]] = [
        {"index": index, "object": "pooling", "data": array}
        for index, array in enumerate(answer.multi_vector or answer.vectors)
    ]
    return _write_entries(empty, entries, encoding)


def write_outputs(
    answer: Embedded, outputs: Sequence[Output], *, name: str, model: str, encoding: str
) -> Iterator[bytes]:
    """Yield the JSON of OpenAI's answer with a field for each output, in pieces."""
    usage = usage_dict(answer.prompt_tokens)
    empty = Embeddings(id=name, object="list", data=[], model=model, usage=usage)
    entries: list[dict[str, object]] = []
    for index, vector in enumerate(answer.vectors):
        entry: dict[str, object] = {"object": "embedding", "index": index, "embedding": []}
        if "dense" in outputs:
            entry |= {"embedding": vector, "dense": vector}
        if "sparse" in outputs:
            sparse = answer.sparse[index]
            entry["sparse"] = {"indices": sparse.ids, "values": sparse.weights}
        if "multi_vector" in outputs:
            entry["multi_vector"] = answer.multi_vector[index]
        entries.append(entry)
    return _write_entries(empty, entries, encoding)


def _write_entries(
    empty: Embeddings | Pooled, entries: Iterable[Mapping[str, object]], encoding: str
) -> Iterator[bytes]:
    """Yield an answer, empty so far, with these entries; matrices in base64 have their shape."""
    before, after = orjson.dumps(empty).split(b"[]", 1)
    yield before + b"["
    for index, entry in enumerate(entries):
        start = b",{" if index else b"{"
        for key, value in entry.items():
            yield start + orjson.dumps(key) + b":"
            if isinstance(value, np.ndarray):
                yield from write_array(value, encoding)
                if encoding == "base64" and value.ndim > 1:
                    yield b"," + orjson.dumps({f"{key}_shape": value.shape})[1:-1]
            else:
                yield orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
            start = b","
        yield b"}"
    yield b"]" + after


def write_array(array: Matrix, encoding: str) -> Iterator[bytes]:
    """Yield a vector or a matrix in pieces of about PIECE_FLOATS numbers."""
    if encoding == "base64":
        data = array.astype("<f4").tobytes()
        step = 12 * (PIECE_FLOATS // 3)  # groups of 3 bytes, so that the pieces can be joined
        parts = [data[start : start + step] for start in range(0, len(data), step)]
        yield b'"'
        yield from map(base64.b64encode, parts)
        yield b'"'
        return
    rows = max(1, PIECE_FLOATS * len(array) // max(1, array.size))
    yield b"["
    for start in range(0, len(array), rows):
        part = np.ascontiguousarray(array[start : start + rows])
        piece = orjson.dumps(part, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
        yield b"," + piece if start else piece
    yield b"]"


def write_vectors(answer: Embedded) -> Iterator[bytes]:
    """Yield the JSON of TEI's answer in pieces, with vectors scaled to length 1."""
    return write_array(unit_rows(answer.vectors), "float")


def unit_rows(vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return little-endian vectors scaled to length 1."""
    vectors = np.ascontiguousarray(vectors, dtype="<f4")
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled: npt.NDArray[np.float32] = vectors / np.maximum(lengths, np.finfo("<f4").tiny)
    return scaled


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
