"""Embedding models, and the passes that an encoder runs over batches."""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext
from importlib.metadata import version
from itertools import cycle, islice
from pathlib import Path
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
from gateway.engine.embedding.modernbert import ModernBert
from gateway.engine.embedding.pooling import (
    Projection,
    Recipe,
    pool,
    read_projections,
    read_recipe,
    shorten,
    unit,
)
from gateway.engine.embedding.rotary_bert import Gte, JinaV3, NomicBert
from gateway.engine.embedding.tokenizer import TextTokenizer, load_text_tokenizer
from gateway.engine.models.checkpoint import Checkpoint, read_in_slices
from gateway.engine.models.context import text_context
from gateway.engine.models.folder import join_names
from gateway.errors import BadRequest, ContextLengthExceeded, EngineFailed

if TYPE_CHECKING:
    from gateway.engine.embedding.decoder import Decoder
    from gateway.engine.models.missing_kernels import Report

# On a CPU, the buffers of a larger pass exceed the processor's cache.
SLICE_TOKENS: Final = 512
# Multiply-adds that are worth a thread, which takes 0.4 ms to start.
WORTH_A_THREAD: Final = 30_000_000
# Values of transformer_task and module_output_name.
_TASK: Final = ("feature-extraction", "token_embeddings")


def bucket(length: int) -> int:
    """Round a length up to a multiple of 8 and, above 64, by at most a quarter."""
    step = 8
    if length > 64:
        step = 1 << (length - 1).bit_length() - 3
    return -(-length // step) * step


def worthwhile_threads(tokens: int, weights: int, threads: int) -> int:
    return max(1, min(threads, tokens * weights // WORTH_A_THREAD))


def slice_rows(lengths: Sequence[int], threads: int) -> list[int]:
    """Divide rows, sorted by length, into passes; return the number of rows in each pass.

    A pass costs its rows times its longest row: at most SLICE_TOKENS, unless one row is longer. Use
    as few passes as possible, rounded up to a multiple of `threads`, and make the most expensive
    pass as cheap as possible.
    """
    costs = range(lengths[-1], len(lengths) * lengths[-1] + 1)
    row_count = threads
    while True:
        cheapest = bisect_left(costs, True, key=lambda cost: len(_runs(lengths, cost)) <= row_count)
        if costs[cheapest] <= max(SLICE_TOKENS, lengths[-1]):
            return _runs(lengths, costs[cheapest])
        row_count += threads


def _runs(lengths: Sequence[int], cost: int) -> list[int]:
    runs = [0]
    for length in lengths:
        if (runs[-1] + 1) * length <= cost:
            runs[-1] += 1
        else:
            runs.append(1)
    return runs


def in_step(
    passes: Sequence[Iterator[mx.array]], streams: Sequence[mx.Stream]
) -> Iterator[list[mx.array]]:
    """Advance passes of equal depth together, layer by layer, each on its own stream."""
    while True:
        states: list[mx.array] = []
        for one, stream in zip(passes, cycle(streams), strict=False):
            with mx.stream(stream):
                states += islice(one, 1)
        if not states:
            return
        yield states


Results = npt.NDArray[np.float32]


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
        # Each token is multiplied by all weights but the embeddings.
        table = encoder.vocabulary * encoder.dimensions
        self._weights = sum(array.size for array in encoder.parameters()) - table

    @property
    def dtype(self) -> mx.Dtype:
        dtypes = (array.dtype for array in self._encoder.parameters())
        return next((dtype for dtype in dtypes if mx.issubdtype(dtype, mx.floating)), mx.float32)

    @property
    def vocab_size(self) -> int:
        return self._encoder.vocabulary

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
        if not rows:
            return np.zeros((0, width), dtype=np.float32)
        self._check(rows)
        order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
        lengths = [len(rows[index]) for index in order]
        threads = self._threads(sum(lengths))
        counts = slice_rows(lengths, threads) if self._on_cpu else [len(rows)]
        waiting = iter(order)
        slices = [list(islice(waiting, count)) for count in counts]
        passes = [
            self._forward([rows[i] for i in piece], starts and [starts[i] for i in piece])
            for piece in slices
        ]
        results = np.empty((len(rows), width), dtype=np.float32)
        results[order] = self._run_passes(passes, threads)
        self._check_results(results)
        return results

    def _threads(self, tokens: int) -> int:
        if not self._on_cpu:
            return 1
        return worthwhile_threads(tokens, self._weights, cpu_threads())

    def _run_passes(self, passes: Sequence[Iterator[mx.array]], threads: int) -> Results:
        streams = [mx.default_stream(mx.default_device())]
        if len(passes) > 1:
            streams = cpu_streams(min(threads, len(passes)))
        states: list[mx.array] = []
        with single_threaded_blas() if len(streams) > 1 else nullcontext():
            # mlx queues only about fifty operations ahead, so each stream gets one layer at a time.
            for states in in_step(passes, streams):
                if self._on_cpu:
                    mx.async_eval(states)  # type: ignore[no-untyped-call]
            evaluate(states)
        return np.concatenate([np.array(results) for results in states])

    def _forward(
        self, rows: Sequence[Sequence[int]], starts: Sequence[int] | None = None
    ) -> Iterator[mx.array]:
        lengths = [len(row) for row in rows]
        longest = max(lengths)
        # A GPU reuses buffers of equal shapes.
        width = longest if self._on_cpu else min(bucket(longest), self._encoder.max_tokens)
        padded = np.full((len(rows), width), self._encoder.padding_id, dtype=np.int32)
        for index, row in enumerate(rows):
            padded[index, : len(row)] = row
        counts = mx.array(lengths, dtype=mx.int32)
        columns = mx.arange(width)[None]
        mask = columns < counts[:, None] if min(lengths) < width else None
        types = None if starts is None else columns >= mx.array(list(starts))[:, None]
        for hidden in self._encoder(mx.array(padded), mask, types):
            yield hidden
        yield self._finish(hidden, counts, mask)

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
        from gateway.engine.models.decoders import is_known  # mlx-lm takes a second to import

    if not is_known(SAME_AS.get(kind, kind)):
        raise checkpoint.failed(
            f"its architecture, `{kind}`, is not supported: encoders are {', '.join(ENCODERS)}, "
            f"and decoders those of mlx-lm {version('mlx-lm')}, such as llama, mistral and qwen3"
        )
    return Decoder


def read_transformer_settings(checkpoint: Checkpoint, task: str, output: str) -> dict[str, Any]:
    """Read sentence_bert_config.json, or its older names, and refuse unsupported values."""
    files = sorted(path.name for path in checkpoint.folder.glob("sentence_*_config.json"))
    settings = checkpoint.read_object(files[0]) if files else {}
    for key, served in (
        ("transformer_task", (None, task)),
        ("module_output_name", (None, output)),
        ("processing_kwargs", (None, {})),
        ("query_expansion", (None,)),
    ):
        if settings.get(key) not in served:
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


def read_embedding_context(
    folder: Path, max_context: int | None, pooling: str | None, normalize: bool | None
) -> int:
    """Return the `max_tokens` of a folder's engine. Raises ModelLoadFailed."""
    checkpoint = Checkpoint(folder.name, folder)
    inner = checkpoint.inside(read_recipe(checkpoint, pooling, normalize).transformer)
    return read_encoder_context(inner, read_transformer_settings(inner, *_TASK), max_context)


Vectors = npt.NDArray[np.float32]


class EmbeddingEngine(EncoderEngine):
    """A loaded embedding model. Only its tokenization is safe on any thread."""

    result = "vector"

    def __init__(
        self,
        name: str,
        encoder: Encoder,
        tokenizer: TextTokenizer,
        recipe: Recipe,
        projections: Sequence[Projection] = (),
        *,
        device: Device,
        max_tokens: int,
        prompts: Mapping[str, str],
        default_prompt_name: str | None,
    ) -> None:
        super().__init__(name, encoder, device=device, max_tokens=max_tokens)
        self.tokenizer = tokenizer
        self.has_patterns = tokenizer.has_patterns
        self.dimensions = encoder.dimensions
        if projections:
            self.dimensions = int(projections[-1].dense.weight.shape[1])
        self.prompts = prompts
        self.default_prompt_name = default_prompt_name
        self._recipe = recipe
        self._projections = projections

    def close(self) -> None:
        self._projections = ()
        super().close()

    def nbytes(self) -> int:
        return super().nbytes() + sum(a.nbytes for a in arrays_of(list(self._projections)))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return texts' token ids, special tokens included. Safe on any thread."""
        return self.tokenizer.encode(texts)

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
        return self._run(rows, self.dimensions)

    def _check_results(self, results: Results) -> None:
        super()._check_results(results)
        self._refuse((results == 0).all(axis=1), "is zero")

    @unfused()
    def probe(self) -> None:
        self.embed(self.encode(["Hello"]))

    def _finish(self, hidden: mx.array, counts: mx.array, mask: mx.array | None) -> mx.array:
        vectors = pool(hidden, counts, mask, self._recipe.pooling)
        for project in self._projections:
            vectors = project(vectors)
        if self._recipe.normalize:
            return unit(vectors)
        return vectors


def load_embedding_in_steps(
    folder: Path,
    *,
    name: str,
    device: Device,
    dtype: str | None = None,
    pooling: str | None = None,
    normalize: bool | None = None,
    max_context: int | None = None,
    prompts: Mapping[str, str] | None = None,
    report: "Report | None" = None,
) -> Generator[EmbeddingEngine | None]:
    """Load an embedding model from a folder of safetensors; the last step yields the engine.

    `pooling` (mean, cls, last), `normalize` and non-empty `prompts` override the folder's settings.
    `max_context` can only lower the model's limit. `report` is called with quantized weights that
    the device has no kernel for. Raises ModelLoadFailed.
    """
    checkpoint = Checkpoint(name, folder)
    recipe = read_recipe(checkpoint, pooling, normalize)
    inner = checkpoint.inside(recipe.transformer)
    saved = checkpoint.read_object("config_sentence_transformers.json")
    limits = read_transformer_settings(inner, *_TASK)
    tokenizer = load_text_tokenizer(inner, lower_case=bool(limits.get("do_lower_case")))
    yield None
    if (inner.folder / "adapter_config.json").is_file():
        raise inner.failed("its folder has a LoRA adapter, which is not added to embedding models")
    encoder = open_encoder(inner, inner.read_object("config.json"), device, dtype)
    projections = read_projections(checkpoint, recipe, encoder.dimensions)
    yield from read_in_slices(inner, [*encoder.parameters(), *arrays_of(projections)])
    if isinstance(encoder, Bert):
        yield from encoder.pack_in_steps()
    # Decoder isn't imported here: mlx-lm takes a second to import.
    if hasattr(encoder, "replace_missing"):
        yield from encoder.replace_missing(name, device, report)
    yield EmbeddingEngine(
        name,
        encoder,
        tokenizer,
        recipe,
        projections,
        device=device,
        max_tokens=read_max_tokens(inner, encoder.max_tokens, limits, max_context),
        prompts=prompts or {key: text or "" for key, text in (saved.get("prompts") or {}).items()},
        default_prompt_name=saved.get("default_prompt_name"),
    )
