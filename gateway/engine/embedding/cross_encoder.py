"""Rerankers that score pairs of texts with a classification head on an encoder."""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

import mlx.core as mx

from gateway.engine.compiled_code import unfused
from gateway.engine.device import Device
from gateway.engine.embedding.bert import (
    Bert,
    Dense,
    Norm,
    arrays_of,
    make_dense,
    make_norm,
    read_activation,
)
from gateway.engine.embedding.engine import (
    ENCODERS,
    Encoder,
    EncoderEngine,
    Results,
    open_encoder,
    read_encoder_context,
    read_max_tokens,
    read_transformer_settings,
)
from gateway.engine.embedding.pooling import pool
from gateway.engine.embedding.tokenizer import (
    PairTemplate,
    TextTokenizer,
    load_text_tokenizer,
    read_pair_template,
)
from gateway.engine.models.checkpoint import (
    Checkpoint,
    dequantize,
    fit_weights,
    read_in_slices,
)
from gateway.engine.models.encoder_kernels import Activation, arithmetic
from gateway.errors import ContextLengthExceeded
from gateway.jobs.rerank import Pair

Pooling = Literal["cls", "mean"]
# The values of transformer_task and module_output_name in sentence_bert_config.json.
_TASK: Final = ("sequence-classification", "scores")


@dataclass(frozen=True, slots=True)
class Head:
    """A classification head, which maps hidden states to logits."""

    pooling: Pooling
    dense: Dense
    activation: Activation
    norm: Norm | None
    out: Dense

    def __call__(self, hidden: mx.array, counts: mx.array, mask: mx.array | None) -> mx.array:
        """Map (rows, tokens, dimensions) to (rows, labels), in float32."""
        pooled = pool(hidden, counts, mask, self.pooling)
        x = self.activation(self.dense(pooled))
        if self.norm is not None:
            x = self.norm(x)
        return self.out(x).astype(mx.float32)


@dataclass(frozen=True, slots=True)
class HeadNames:
    """The names of a head's weights in transformers."""

    dense: str
    out: str
    norm: str | None = None


_OF_ROBERTA: Final = HeadNames("classifier.dense", "classifier.out_proj")
# The keys are values of model_type in config.json.
HEADS: Final = {
    "bert": HeadNames("bert.pooler.dense", "classifier"),
    "roberta": _OF_ROBERTA,
    "xlm-roberta": _OF_ROBERTA,
    "camembert": _OF_ROBERTA,
    "modernbert": HeadNames("head.dense", "classifier", norm="head.norm"),
}
assert HEADS.keys() <= ENCODERS.keys()


class CrossEncoderEngine(EncoderEngine):
    """A loaded reranker. Only `encode_pairs` is safe on any thread."""

    result = "score"

    def __init__(
        self,
        name: str,
        encoder: Encoder,
        head: Head,
        tokenizer: TextTokenizer,
        template: PairTemplate,
        *,
        device: Device,
        max_tokens: int,
    ) -> None:
        super().__init__(name, encoder, device=device, max_tokens=max_tokens)
        self.tokenizer = tokenizer
        self.labels = int(head.out.weight.shape[1])
        self._head = head
        self._template = template

    def close(self) -> None:
        del self._head
        super().close()

    def nbytes(self) -> int:
        return super().nbytes() + sum(array.nbytes for array in arrays_of(self._head))

    def encode_pairs(
        self,
        query: str,
        documents: Sequence[str],
        *,
        max_document_tokens: int | None = None,
        instruction: str | None = None,
    ) -> list[Pair]:
        """Join a query with each document. Documents that are too long are cut.

        Raises ContextLengthExceeded if the query leaves no room for a document.
        """
        # Queries are never cut. sentence-transformers cuts them with truncation="longest_first".
        [first] = self.tokenizer.encode([query], with_specials=False)
        room = self.max_tokens - self._template.specials - len(first)
        if room < 1:
            min_tokens = self.max_tokens - room + 1
            raise ContextLengthExceeded(self.max_tokens, min_tokens, noun="query")
        keep = min(room, max_document_tokens or room)
        encoded = self.tokenizer.encode_start(documents, keep, with_specials=False)
        return [
            Pair(
                *self._template.join(first, self.tokenizer.cut(ids, keep)), max(0, len(ids) - keep)
            )
            for ids in encoded
        ]

    def score(self, rows: Sequence[Pair]) -> Results:
        """Return raw logits, (rows, labels). A pair's logits do not depend on the other pairs.

        Raises ContextLengthExceeded, BadRequest, or EngineFailed for a score that is not finite.
        """
        return self._run([row.ids for row in rows], self.labels, self._starts(rows))

    def in_steps(self, rows: Sequence[Pair]) -> Generator[Results | None]:
        """Yield None after each layer, and finally the logits; one pair's are those of `score`."""
        ids = [row.ids for row in rows]
        for results in self._run_in_steps(ids, [self._finish], self._starts(rows)):
            if results is None:
                yield None
            else:
                self._check_results(results[0])
                yield results[0]

    def _starts(self, rows: Sequence[Pair]) -> Sequence[int] | None:
        lead = self._template.lead
        return None if lead is None else [row.second - lead for row in rows]

    @unfused()
    def probe(self) -> None:
        self.score(self.encode_pairs("Hello", ["Hello"]))

    def _finish(self, hidden: mx.array, counts: mx.array, mask: mx.array | None) -> mx.array:
        return self._head(hidden, counts, mask)


def load_cross_encoder_in_steps(
    folder: Path,
    *,
    name: str,
    device: Device,
    dtype: str | None = None,
    max_context: int | None = None,
) -> Generator[CrossEncoderEngine | None]:
    """Load a reranker from a folder of safetensors; the last step yields the engine.

    `max_context` can only lower the limit in the model's files. Raises ModelLoadFailed.
    """
    checkpoint = Checkpoint(name, folder)
    inner = find_transformer(checkpoint)
    limits = read_transformer_settings(inner, *_TASK)
    config = inner.read_object("config.json")
    with inner.reading_config():
        _refuse_other_tasks(inner, config)
    tokenizer = load_text_tokenizer(inner, lower_case=bool(limits.get("do_lower_case")))
    template = read_pair_template(inner, tokenizer)
    yield None
    encoder = open_encoder(inner, config, device, dtype)
    head = _open_head(inner, config, device, encoder)
    yield from read_in_slices(inner, [*encoder.parameters(), *arrays_of(head)])
    if isinstance(encoder, Bert):
        yield from encoder.pack_in_steps()
    yield CrossEncoderEngine(
        name,
        encoder,
        head,
        tokenizer,
        template,
        device=device,
        max_tokens=read_max_tokens(inner, encoder.max_tokens, limits, max_context),
    )


def read_cross_context(folder: Path, max_context: int | None) -> int:
    """Return the `max_tokens` of a folder's engine. Raises ModelLoadFailed."""
    inner = find_transformer(Checkpoint(folder.name, folder))
    return read_encoder_context(inner, read_transformer_settings(inner, *_TASK), max_context)


def find_transformer(checkpoint: Checkpoint) -> Checkpoint:
    """Return the folder of the only module in modules.json, or this folder if there is no list."""
    modules = checkpoint.read_modules()
    if modules is None:
        return checkpoint
    names = [name for name, _ in modules]
    if names != ["Transformer"]:
        raise checkpoint.failed(
            f"modules.json lists {', '.join(names)}, where a reranker has a Transformer alone"
        )
    return checkpoint.inside(modules[0][1])


def _refuse_other_tasks(checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
    kind = config.get("model_type")
    if kind not in HEADS:
        raise checkpoint.failed(
            f"its architecture, `{kind}`, is not supported for reranking: "
            f"supported are {', '.join(HEADS)}"
        )
    # Heads of other tasks may have weights with the same names, so the task is checked.
    for task in config.get("architectures") or ():
        if not str(task).endswith("ForSequenceClassification"):
            raise checkpoint.failed(
                f"config.json: architectures has {task}, where a reranker has one for "
                "SequenceClassification"
            )


def _open_head(
    checkpoint: Checkpoint, config: Mapping[str, Any], device: Device, encoder: Encoder
) -> Head:
    names = HEADS[config["model_type"]]
    d = encoder.dimensions
    weights_dtype = encoder.parameters()[0].dtype
    opened = dequantize(checkpoint, checkpoint.weights(), config.get("quantization") or {})
    parts = [part for part in (names.dense, names.out, names.norm) if part is not None]
    arrays = {n: a for n, a in opened.items() if n.rpartition(".")[0] in parts}
    bias = arrays.get(f"{names.out}.bias")
    labels = 1 if bias is None else bias.size
    shapes: dict[str, tuple[int, ...]] = {
        f"{names.dense}.weight": (d, d),
        f"{names.out}.weight": (labels, d),
        f"{names.out}.bias": (labels,),
    }
    # Without `classifier_bias`, only the last layer of ModernBERT's head has a bias.
    if names.norm is None or config.get("classifier_bias"):
        shapes[f"{names.dense}.bias"] = (d,)
    if names.norm is not None:
        shapes[f"{names.norm}.weight"] = (d,)
    weights = {
        n: a.astype(weights_dtype) for n, a in fit_weights(checkpoint, arrays, shapes).items()
    }
    dense, out = make_dense(weights, names.dense), make_dense(weights, names.out)
    if names.norm is None:
        return Head("cls", dense, mx.tanh, None, out)
    pooling = config.get("classifier_pooling", "cls")
    if pooling not in get_args(Pooling):
        raise checkpoint.failed(f"config.json: classifier_pooling `{pooling}` is not supported")
    named = read_activation(checkpoint, config, "classifier_activation")
    choice = arithmetic(device, weights_dtype, named, d, heads=1)
    norm = make_norm(weights, names.norm, choice, float(config.get("norm_eps", 1e-5)))
    return Head(pooling, dense, choice.activation, norm, out)
