"""Embedding models, and the passes that an encoder runs over batches."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from importlib.metadata import version
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from gateway.engine.compiled_code import unfused
from gateway.engine.device import (
    Device,
    clear_cache,
    cpu_streams,
    cpu_threads,
    evaluate,
    keep_file_limits,
    single_threaded_blas,
)
from gateway.engine.embedding.bert import Bert, Roberta, arrays_of
from gateway.engine.embedding.colbert import (
    MarkedTokenizer,
)
from gateway.engine.embedding.modernbert import ModernBert
from gateway.engine.embedding.outputs import (
    Head,
    TokenVectors,
)
from gateway.engine.embedding.passes import bucket, in_step, slice_rows, worthwhile_threads
from gateway.engine.embedding.pooling import (
    Projection,
    Recipe,
    pool,
    shorten,
    unit,
)
from gateway.engine.embedding.rotary_bert import Gte, JinaV3, NomicBert
from gateway.engine.embedding.tokenizer import TextTokenizer
from gateway.engine.models.checkpoint import Checkpoint
from gateway.engine.models.context import GEMMA2, text_context
from gateway.engine.models.folder import join_names
from gateway.errors import BadRequest, ContextLengthExceeded, EngineFailed
from gateway.jobs import Vectors
from gateway.jobs.embed import Output, SparseVector, TextOutputs

if TYPE_CHECKING:
    from gateway.engine.embedding.decoder import Decoder

# Multiply-adds a second by which a first pass is sized: half of an M1's GPU, one slow core.
RATES: Final = {False: 6e11, True: 2e10}  # by whether it is a CPU

Results = npt.NDArray[np.float32]
# Maps the last hidden states, the rows' numbers of tokens and the mask to float32 results.
Finish = Callable[[mx.array, mx.array, mx.array | None], mx.array]


class Encoder(Protocol):
    """A map from token ids to hidden states."""

    dimensions: int
    vocabulary: int
    padding_id: int
    max_tokens: int

    def __call__(
        self, tokens: mx.array, mask: mx.array | None, types: mx.array | None = None
    ) -> Iterator[mx.array]:
        """Yield (rows, tokens, dimensions) after each layer, and finally the hidden states.

        `mask` is true at real tokens, or None if all are real. `types` is true at tokens of type 1,
        or None if there are none.
        """

    def parameters(self) -> list[mx.array]:
        """List every array of the encoder."""


# The keys are values of model_type in config.json.
ENCODERS: Final[dict[str, type[Bert] | type[ModernBert]]] = {
    "bert": Bert,
    "roberta": Roberta,
    "xlm-roberta": Roberta,
    "camembert": Roberta,
    "modernbert": ModernBert,
    "nomic_bert": NomicBert,
    "gte": Gte,
    "new": Gte,  # GTE's name before transformers had its class
    "jina_embeddings_v3": JinaV3,
}


class EncoderEngine(ABC):
    """A loaded encoder that runs batches, on the thread that loaded it."""

    result: ClassVar[str]  # the word for a row's result in messages

    def __init__(self, name: str, encoder: Encoder, *, device: Device, max_tokens: int) -> None:
        self.name = name
        self.max_tokens = max_tokens
        self._encoder = encoder
        self._on_cpu = device is Device.CPU
        # Each token is multiplied by all weights but the embeddings. Packed, eight take 32 bits.
        table = encoder.vocabulary * encoder.dimensions
        sizes = (a.size * (8 if a.dtype == mx.uint32 else 1) for a in encoder.parameters())
        self._weights = max(0, sum(sizes) - table)

    @property
    def dtype(self) -> mx.Dtype:
        dtypes = (array.dtype for array in self._encoder.parameters())
        return next((dtype for dtype in dtypes if mx.issubdtype(dtype, mx.floating)), mx.float32)

    @property
    def vocab_size(self) -> int:
        return self._encoder.vocabulary

    @property
    def token_s(self) -> float:
        """Return an estimate of the seconds that a token takes, from the number of weights."""
        return self._weights / RATES[self._on_cpu]

    def close(self) -> None:
        del self._encoder
        clear_cache()

    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._encoder.parameters())

    @abstractmethod
    def _finish(self, hidden: mx.array, counts: mx.array, mask: mx.array | None) -> mx.array:
        """Map the last hidden states to one float32 result per row."""

    def _run(
        self, rows: Sequence[Sequence[int]], width: int, starts: Sequence[int] | None = None
    ) -> Results:
        """Return each row's result, (rows, width), with token type 1 from `starts` on."""
        results = np.empty((len(rows), width), dtype=np.float32)
        for indices, [values] in self._passes(rows, [self._finish], starts):
            results[indices] = values
        self._check_results(results)
        return results

    def _passes(
        self,
        rows: Sequence[Sequence[int]],
        finishes: Sequence[Finish],
        starts: Sequence[int] | None = None,
    ) -> Iterator[tuple[list[int], list[Results]]]:
        """Yield the indices of each pass's rows, and its result of each of `finishes`."""
        if not rows:
            return
        self._check(rows)
        order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
        lengths = [len(rows[index]) for index in order]
        threads = self._threads(sum(lengths))
        counts = slice_rows(lengths, threads) if self._on_cpu else [len(rows)]
        waiting = iter(order)
        slices = [list(islice(waiting, count)) for count in counts]
        passes = [
            self._forward([rows[i] for i in piece], finishes, starts and [starts[i] for i in piece])
            for piece in slices
        ]
        states = self._run_passes(passes, threads, len(finishes))
        for index, piece in enumerate(slices):
            yield piece, [np.array(results[index]) for results in states]

    def _run_in_steps(
        self,
        rows: Sequence[Sequence[int]],
        finishes: Sequence[Finish],
        starts: Sequence[int] | None = None,
    ) -> Generator[list[Results] | None]:
        """Yield None after each layer of one pass, and finally its result of each of `finishes`."""
        self._check(rows)
        last: deque[mx.array] = deque(maxlen=len(finishes))
        for states in self._forward(rows, finishes, starts):
            evaluate(states)
            last.append(states)
            yield None
        yield [np.array(states) for states in last]

    def _threads(self, tokens: int) -> int:
        if not self._on_cpu:
            return 1
        return worthwhile_threads(tokens, self._weights, cpu_threads())

    def _run_passes(
        self, passes: Sequence[Iterator[mx.array]], threads: int, results: int
    ) -> Sequence[list[mx.array]]:
        """Run passes; return their last `results`, each with an array of each pass."""
        streams = [mx.default_stream(mx.default_device())]
        if len(passes) > 1:
            streams = cpu_streams(min(threads, len(passes)))
        last: deque[list[mx.array]] = deque(maxlen=results)
        with single_threaded_blas() if len(streams) > 1 else nullcontext():
            # mlx queues only about fifty operations ahead, so each stream gets one layer at a time.
            for states in in_step(passes, streams):
                if self._on_cpu:
                    mx.async_eval(states)  # type: ignore[no-untyped-call]
                last.append(states)
            evaluate(list(last))
        return last

    def _forward(
        self,
        rows: Sequence[Sequence[int]],
        finishes: Sequence[Finish],
        starts: Sequence[int] | None = None,
    ) -> Iterator[mx.array]:
        lengths = [len(row) for row in rows]
        longest = max(lengths)
        # A GPU reuses buffers of equal shapes.
        width = longest if self._on_cpu else min(bucket(longest), self._encoder.max_tokens)
        padded = np.full((len(rows), width), self._encoder.padding_id, dtype=np.int32)
        for index, row in enumerate(rows):
            padded[index, : len(row)] = row
        seen = [self._attended(row) for row in rows]
        counts = mx.array(seen, dtype=mx.int32)
        columns = mx.arange(width)[None]
        mask = columns < counts[:, None] if min(seen) < width else None
        types = None if starts is None else columns >= mx.array(list(starts))[:, None]
        for hidden in self._encoder(mx.array(padded), mask, types):
            yield hidden
        for finish in finishes:
            yield finish(hidden, counts, mask)

    def _attended(self, ids: Sequence[int]) -> int:
        """Return how many of a row's first tokens the others see."""
        return len(ids)

    def _check(self, rows: Sequence[Sequence[int]]) -> None:
        # mlx would read outside the embeddings: it does not check bounds.
        longest = max(map(len, rows))
        if longest > self.max_tokens:
            raise ContextLengthExceeded(self.max_tokens, longest, noun="input")
        for index, row in enumerate(rows):
            if not row:
                raise BadRequest(f"Input {index} has no tokens for `{self.name}`.", part="prompt")
            if min(row) < 0 or max(row) >= self._encoder.vocabulary:
                raise BadRequest(
                    f"Input {index} has token ids outside the vocabulary of `{self.name}` "
                    f"(0 to {self._encoder.vocabulary - 1}).",
                    part="prompt",
                )

    def _check_results(self, results: Results) -> None:
        self._refuse(~np.isfinite(results).all(axis=1), "is not finite")

    def _refuse(self, is_broken: Any, problem: str) -> None:
        if is_broken.any():
            broken = join_names([str(index) for index in np.flatnonzero(is_broken)])
            raise EngineFailed(self.name, f"the {self.result} of row {broken} {problem}")


def open_encoder(
    checkpoint: Checkpoint, config: Mapping[str, Any], device: Device, dtype: str | None
) -> Encoder:
    """Open the encoder that a config names, without reading its weights."""
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise checkpoint.failed("config.json has no model_type")
    opened: Callable[..., Encoder] = ENCODERS.get(kind) or _find_decoder(checkpoint, kind)
    try:
        return opened(checkpoint, config, device, dtype)
    except ValueError as error:
        raise checkpoint.failed(str(error)) from error


def _find_decoder(checkpoint: Checkpoint, kind: str) -> "type[Decoder]":
    with keep_file_limits():
        from gateway.engine.embedding.decoder import SAME_AS, Decoder
        from gateway.engine.embedding.embedding_gemma2 import EmbeddingGemma2
        from gateway.engine.models.decoders import is_known  # mlx-lm takes a second to import

    if kind not in GEMMA2 and not is_known(SAME_AS.get(kind, kind)):
        raise checkpoint.failed(
            f"its architecture, `{kind}`, is not supported: encoders are {', '.join(ENCODERS)}, "
            f"and decoders those of mlx-lm {version('mlx-lm')}, such as llama, mistral and qwen3"
        )
    return EmbeddingGemma2 if kind in GEMMA2 else Decoder


def read_transformer_settings(
    checkpoint: Checkpoint, task: str, output: str, *, is_colbert: bool = False
) -> dict[str, Any]:
    """Read sentence_bert_config.json, or its older names, and refuse unsupported values."""
    files = sorted(path.name for path in checkpoint.folder.glob("sentence_*_config.json"))
    settings = checkpoint.read_object(files[0]) if files else {}
    for key, served in (
        ("transformer_task", (None, task)),
        ("module_output_name", (None, output)),
        ("processing_kwargs", (None, {})),
        ("query_expansion", (None,)),
    ):
        if settings.get(key) not in served and not (is_colbert and key == "query_expansion"):
            raise checkpoint.failed(f"{files[0]}: {key} {settings[key]} is not supported")
    return settings


def read_max_tokens(
    checkpoint: Checkpoint, positions: int, settings: Mapping[str, Any], asked: int | None
) -> int:
    """Return the lowest of the model files' limits, `positions` and `asked`."""
    stated = {"max_seq_length": settings.get("max_seq_length")}
    if stated["max_seq_length"] is None:
        config = checkpoint.read_object("tokenizer_config.json")
        stated = {"model_max_length": config.get("model_max_length")}
    limits = {"max_position_embeddings": positions, **stated, "max_context": asked}
    with checkpoint.reading_config():
        least, name = min((limit, name) for name, limit in limits.items() if limit is not None)
        if not least >= 1:
            raise checkpoint.failed(f"its {name} is {least}, but must be at least 1")
        return int(least)


def read_encoder_context(folder: Checkpoint, limits: Mapping[str, Any], asked: int | None) -> int:
    """Return the `max_tokens` of an encoder's folder, special tokens included."""
    config = folder.read_object("config.json")
    encoder = ENCODERS.get(str(config.get("model_type")))
    with folder.reading_config():
        positions = encoder.read_max_tokens(folder, config) if encoder else text_context(config)
    return read_max_tokens(folder, positions, limits, asked)


class EmbeddingEngine(EncoderEngine):
    """A loaded embedding model. Only its tokenization is safe on any thread."""

    result = "vector"

    def __init__(
        self,
        name: str,
        encoder: Encoder,
        tokenizer: TextTokenizer | MarkedTokenizer,
        recipe: Recipe,
        projections: Sequence[Projection] = (),
        heads: Mapping[Output, Head] | None = None,
        *,
        device: Device,
        max_tokens: int,
        prompts: Mapping[str, str],
        default_prompt_name: str | None,
    ) -> None:
        super().__init__(name, encoder, device=device, max_tokens=max_tokens)
        self.tokenizer = tokenizer
        self.has_patterns = tokenizer.has_patterns
        self.dimensions = 0  # no dense vector
        if recipe.pooling not in ("splade", "tokens"):
            self.dimensions = encoder.dimensions
        if projections:
            self.dimensions = int(projections[-1].dense.weight.shape[1])
        self.prompts = prompts
        self.default_prompt_name = default_prompt_name
        self._recipe = recipe
        self._projections = projections
        self._heads = dict(heads or {})
        dense: tuple[Output, ...] = ("dense",) if self.dimensions else ()
        self.outputs: tuple[Output, ...] = (*dense, *self._heads)
        vectors = self._heads.get("multi_vector")
        self.token_dimensions = vectors.dimensions if isinstance(vectors, TokenVectors) else 0

    def close(self) -> None:
        self._projections, self._heads = (), {}
        super().close()

    def nbytes(self) -> int:
        parts = [*self._projections, *self._heads.values()]
        return super().nbytes() + sum(a.nbytes for a in arrays_of(parts))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return texts' token ids, special tokens included. Safe on any thread."""
        return self.tokenizer.encode(texts)

    @property
    def query_tokens(self) -> int:
        """Return the most tokens of a query, which are fewer than `max_tokens` for ColBERT."""
        return getattr(self.tokenizer, "query_length", self.max_tokens)

    def encode_query(self, texts: Sequence[str]) -> list[list[int]]:
        """Return queries' token ids, which are other than documents' for ColBERT alone."""
        return self.tokenizer.encode_query(texts)

    def _attended(self, ids: Sequence[int]) -> int:
        return self.tokenizer.attended(ids)

    def encode_start(self, texts: Sequence[str]) -> list[list[int]]:
        """Return each text's ids, but of a long text only as many as `truncate` needs."""
        return self.tokenizer.encode_start(texts, self.max_tokens)

    def truncate(self, tokens: Sequence[int], limit: int | None = None) -> list[int]:
        """Cut one input to `limit` tokens (`max_tokens` if None), keeping its special tokens."""
        return self.tokenizer.truncate(tokens, limit or self.max_tokens)

    def shorten(self, vectors: Vectors, dimensions: int) -> Vectors:
        """Keep each vector's first `dimensions`; normalize again if the model normalizes."""
        return shorten(vectors, dimensions, normalize=self._recipe.normalize)

    def embed(self, rows: Sequence[Sequence[int]]) -> Vectors:
        """Return each row's vector, (rows, dimensions), independent of the other rows.

        Raises ContextLengthExceeded, BadRequest, or EngineFailed for a vector that is zero or not
        finite.
        """
        if not self.dimensions:
            outputs = join_names(self.outputs)
            raise BadRequest(f"`{self.name}` gives no dense vectors: its output is {outputs}.")
        return self._run(rows, self.dimensions)

    def embed_outputs(
        self, rows: Sequence[Sequence[int]], outputs: Collection[Output]
    ) -> list[TextOutputs]:
        """Return these outputs of each row, of one pass. Raises the errors of `embed`."""
        return self._read(rows, outputs, self._passes(rows, self._finishes(outputs)))

    def in_steps(
        self, rows: Sequence[Sequence[int]], outputs: Collection[Output]
    ) -> Generator[list[TextOutputs] | None]:
        """Yield None after each layer, and finally what `embed_outputs` returns for one row."""
        for results in self._run_in_steps(rows, self._finishes(outputs)):
            if results is None:
                yield None
            else:
                yield self._read(rows, outputs, [(range(len(rows)), results)])

    def _finishes(self, outputs: Collection[Output]) -> list[Finish]:
        return [self._heads.get(each, self._finish) for each in self.outputs if each in outputs]

    def _read(
        self,
        rows: Sequence[Sequence[int]],
        outputs: Collection[Output],
        passes: Iterable[tuple[Sequence[int], list[Results]]],
    ) -> list[TextOutputs]:
        asked = [output for output in self.outputs if output in outputs]
        texts: list[dict[str, Any]] = [{} for _ in rows]
        is_broken = np.zeros(len(rows), bool)
        for indices, results in passes:
            for output, values in zip(asked, results, strict=True):
                head = self._heads.get(output)
                for index, row in zip(indices, values, strict=True):
                    read = texts[index][output] = head.read(rows[index], row) if head else row
                    numbers = read.weights if isinstance(read, SparseVector) else read
                    is_broken[index] |= not np.isfinite(numbers).all()
        self._refuse(is_broken, "is not finite")
        if "dense" in asked and texts:
            self._check_results(np.stack([text["dense"] for text in texts]))
        return [TextOutputs(**text) for text in texts]

    def _check_results(self, results: Results) -> None:
        super()._check_results(results)
        self._refuse((results == 0).all(axis=1), "is zero")

    @unfused()
    def probe(self) -> None:
        self.embed_outputs(self.encode(["Hello"]), self.outputs)

    def _finish(self, hidden: mx.array, counts: mx.array, mask: mx.array | None) -> mx.array:
        vectors = pool(hidden, counts, mask, self._recipe.pooling)
        for project in self._projections:
            vectors = project(vectors)
        if self._recipe.normalize:
            return unit(vectors)
        return vectors
