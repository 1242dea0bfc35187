"""Rerankers on a causal model, whose score is the log-odds of two labels after a prompt.

Source: the model card of Qwen3-Reranker.
"""

import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import KVCache, make_prompt_cache

from gateway.engine.compiled_code import unfused
from gateway.engine.control_tokens import Piece
from gateway.engine.device import Device, clear_cache, evaluate
from gateway.engine.embedding.tokenizer import TextTokenizer, load_text_tokenizer
from gateway.engine.models.checkpoint import Checkpoint, read_in_slices
from gateway.engine.models.context import pair_context
from gateway.engine.models.decoders import floating_dtype, open_decoder, parameters
from gateway.engine.models.kv_costs import measure_kv
from gateway.engine.models.missing_kernels import Report, replace_missing
from gateway.errors import ContextLengthExceeded
from gateway.jobs import TokenIds, Vectors
from gateway.jobs.rerank import Pair

# A shared prefix is computed separately if that saves at least this many tokens.
LEAST_SAVED: Final = 64
# The longest prefix kept between calls, 59 MB of 16-bit KV for Qwen3-Reranker-0.6B.
KEPT_TOKENS: Final = 512
_KVCache: Any = KVCache  # untyped in mlx-lm
_layers: Any = nn


@dataclass(frozen=True, slots=True)
class LabelRecipe:
    """The prompt and the labels of a reranker."""

    template: str  # has `{instruction}`, `{query}` and then `{document}`
    labels: Sequence[str]  # relevant and, optionally, irrelevant
    instruction: str = ""


QWEN3: Final = LabelRecipe(
    "<|im_start|>system\n"
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    ("yes", "no"),
    "Given a web search query, retrieve relevant passages that answer the query",
)


def label_recipe(
    labels: Sequence[str], template: str | None, instruction: str | None
) -> LabelRecipe:
    if instruction is None:
        instruction = QWEN3.instruction
    return LabelRecipe(template or QWEN3.template, labels, instruction)


class LabelScorer:
    """A loaded reranker. Only `encode_pairs` is safe on any thread."""

    def __init__(
        self,
        model: Any,
        tokenizer: TextTokenizer,
        recipe: LabelRecipe,
        head: "LabelHead",
        *,
        max_tokens: int,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._recipe = recipe
        self._head = head
        self._before, after = recipe.template.split("{document}")
        [self._tail] = tokenizer.encode([after], with_specials=False)
        self._controls = tokenizer.controls
        self.max_tokens = max_tokens
        self.token_s = 0.0
        caches = make_prompt_cache(model)
        self._shares_prefixes = all(type(layer) is KVCache for layer in caches)
        self._kv_bytes = measure_kv(model).token
        self._kept = _Beginning()

    @property
    def dtype(self) -> mx.Dtype:
        return floating_dtype(self._model)

    def encode_pairs(
        self,
        query: str,
        documents: Sequence[str],
        *,
        max_document_tokens: int | None = None,
        instruction: str | None = None,
    ) -> list[Pair]:
        """Return the prompts of a query and documents, after cutting documents that are too long.

        Control tokens in callers' texts are encoded as plain text. Raises ContextLengthExceeded if
        the query leaves no room for a document.
        """
        *start, (last, _) = _fill(self._before, query, instruction or self._recipe.instruction)
        end = last.rstrip(" ")  # tokenizers join a space to the word after it
        [first] = self._controls.encode([[*start, (end, False)]])
        room = self.max_tokens - len(first) - len(self._tail)
        if room < 1:
            raise ContextLengthExceeded(self.max_tokens, self.max_tokens - room + 1, noun="query")
        keep = min(room, max_document_tokens or room)
        texts = [last[len(end) :] + document for document in documents]
        encoded = self._tokenizer.encode_start(texts, keep, with_specials=False)
        return [
            Pair(
                [*first, *self._tokenizer.cut(ids, keep), *self._tail],
                len(first),
                max(0, len(ids) - keep),
            )
            for ids in map(self._controls.spell, encoded)
        ]

    def score(self, rows: Sequence[Pair]) -> Vectors:
        """Return the log-odds of relevance, (rows, 1) float32."""
        scores = np.empty((len(rows), 1), dtype=np.float32)
        for places, shared in _group(rows):
            tokens = [rows[place].ids for place in places]
            if not self._shares_prefixes:
                shared = 0
            scores[places, 0] = self._read(tokens, shared)
        return scores

    def in_steps(self, rows: Sequence[Pair]) -> Generator[Vectors | None]:
        yield self.score(rows)  # mlx-lm runs the model as a whole

    @unfused()
    def probe(self) -> None:
        self.score(self.encode_pairs("Hello", ["Hello"]))

    def nbytes(self) -> int:
        """Count the bytes of the weights and of the longest kept prefix."""
        weights = sum(array.nbytes for array in parameters(self._model))
        if not self._shares_prefixes:
            return weights
        return weights + self._kv_bytes * KEPT_TOKENS

    def close(self) -> None:
        del self._model, self._head, self._kept
        clear_cache()

    def _read(self, rows: Sequence[TokenIds], shared: int) -> Vectors:
        """Return the scores, (rows,), of prompts that share their first `shared` tokens."""
        common = tuple(rows[0][:shared])
        beginning, new = _Beginning(), None
        if common and common == self._kept.tokens:
            beginning = self._kept
        elif shared * (len(rows) - 1) >= LEAST_SAVED:
            read = make_prompt_cache(self._model)
            self._model.model(mx.array([list(common)]), cache=read)
            beginning = self._keep(common, read)
        elif len(rows) == 1 and 0 < shared <= KEPT_TOKENS:
            new = make_prompt_cache(self._model)
        shared = len(beginning.tokens)
        lengths = [len(row) - shared for row in rows]
        # Real tokens never see padding on the right, since attention is causal.
        tokens = np.zeros((len(rows), max(lengths)), dtype=np.int32)
        for i, row in enumerate(rows):
            tokens[i, : lengths[i]] = row[shared:]
        hidden = self._model.model(mx.array(tokens), cache=new or beginning.layers or None)
        last = hidden[mx.arange(len(rows)), mx.array(lengths) - 1]
        scores = self._head(last)
        evaluate(scores)
        if new is not None:
            self._keep(common, new)
        return np.array(scores, dtype=np.float32)

    def _keep(self, tokens: tuple[int, ...], caches: Sequence[Any]) -> "_Beginning":
        beginning = _Beginning(tokens, [_SharedPrefix(cache, len(tokens)) for cache in caches])
        evaluate([layer.state for layer in beginning.layers])
        self._kept = beginning if len(tokens) <= KEPT_TOKENS else _Beginning()
        return beginning


@dataclass(frozen=True, slots=True)
class _Beginning:
    """A prefix of prompts, and its KV in each layer."""

    tokens: tuple[int, ...] = ()
    layers: "Sequence[_SharedPrefix]" = ()


class _SharedPrefix(_KVCache):  # type: ignore[misc]
    """One layer's KV of a prefix that all rows of a pass share."""

    def __init__(self, layer: Any, tokens: int) -> None:
        super().__init__()
        self.keys, self.values = (
            mx.contiguous(plane[..., :tokens, :]) for plane in layer.keys_and_values()
        )
        self.offset = tokens

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        # Only the prefix is stored: the rows' own KV would need much more memory.
        return _append(self.keys, keys), _append(self.values, values)


def _append(prefix: mx.array, own: mx.array) -> mx.array:
    """Return a shared prefix followed by each row's own part, (rows, heads, tokens, size)."""
    same = mx.broadcast_to(prefix, (own.shape[0], *prefix.shape[1:]))
    return mx.concatenate([same, own], axis=2)


class LabelHead:
    """The difference of the labels' logits: (rows, hidden) → (rows,) float32."""

    def __init__(self, model: Any, labels: Sequence[int]) -> None:
        layer = model.lm_head if "lm_head" in model else model.model.embed_tokens
        rows = _rows(layer, mx.array(list(labels))).astype(mx.float32)
        bias = getattr(layer, "bias", None)
        offsets = mx.zeros(len(labels)) if bias is None else bias[mx.array(list(labels))]
        signs = mx.array([1.0, -1.0])[: len(labels)]
        self._vector = signs @ rows
        self._offset = (signs * offsets.astype(mx.float32)).sum()
        mx.eval(self._vector, self._offset)

    def __call__(self, hidden: mx.array) -> mx.array:
        return hidden.astype(mx.float32) @ self._vector + self._offset


def _rows(layer: Any, ids: mx.array) -> mx.array:
    if isinstance(layer, _layers.QuantizedLinear):
        biases = layer.biases[ids] if layer.biases is not None else None
        return mx.dequantize(
            layer.weight[ids],
            scales=layer.scales[ids],
            biases=biases,
            group_size=layer.group_size,
            bits=layer.bits,
            mode=layer.mode,
        )
    if isinstance(layer, _layers.Linear):
        return layer.weight[ids]  # type: ignore[no-any-return]
    rows: mx.array = layer(ids)
    return rows


def _fill(text: str, query: str, instruction: str) -> list[Piece]:
    fields = {"{query}": query, "{instruction}": instruction}
    parts = re.split("({query}|{instruction})", text)
    return [(fields.get(part, part), part in fields) for part in parts]


def _group(rows: Sequence[Pair]) -> list[tuple[list[int], int]]:
    """Group rows with the same query; all other rows form one group.

    Return each group's row indices and the length of its common prefix.
    """
    by_query: dict[tuple[int, ...], list[int]] = {}
    for place, row in enumerate(rows):
        by_query.setdefault(tuple(row.ids[: row.second]), []).append(place)
    groups = [(places, len(head)) for head, places in by_query.items() if len(places) > 1]
    single = [(head, places[0]) for head, places in by_query.items() if len(places) == 1]
    if single:
        shared = _count_alike([head for head, _ in single])
        groups.append(([place for _, place in single], shared))
    return groups


def _count_alike(rows: Sequence[tuple[int, ...]]) -> int:
    first, last = min(rows), max(rows)
    alike = zip(first, last, strict=False)
    return next((i for i, (a, b) in enumerate(alike) if a != b), min(len(first), len(last)))


def load_label_scorer_in_steps(
    folder: Path,
    *,
    name: str,
    device: Device,
    dtype: str | None = None,
    max_context: int | None = None,
    recipe: LabelRecipe = QWEN3,
    report: Report | None = None,
) -> Generator[LabelScorer | None]:
    """Load a causal model as a reranker; the last step yields the reranker.

    `report` is called with quantized weights that the device has no kernel for. Raises
    ModelLoadFailed.
    """
    checkpoint = Checkpoint(name, folder)
    config = checkpoint.read_object("config.json")
    if config.get("final_logit_softcapping"):
        raise checkpoint.failed("its logits are capped (final_logit_softcapping) and give no score")
    tokenizer = load_text_tokenizer(checkpoint, lower_case=False)
    ids = _read_labels(checkpoint, tokenizer, recipe.labels)
    yield None
    context = pair_context(config, max_context)
    model, _ = open_decoder(checkpoint, device=device, dtype=dtype, context=context)
    yield from read_in_slices(checkpoint, parameters(model))
    yield from replace_missing(checkpoint.name, model, device, floating_dtype(model), report)
    head = LabelHead(model, ids)
    _check_head(checkpoint, model, head, ids)
    yield LabelScorer(model, tokenizer, recipe, head, max_tokens=context)


def _read_labels(
    checkpoint: Checkpoint, tokenizer: TextTokenizer, labels: Sequence[str]
) -> list[int]:
    encoded = tokenizer.encode(labels, with_specials=False)
    for label, ids in zip(labels, encoded, strict=True):
        if len(ids) != 1:
            raise checkpoint.failed(f"its label {label!r} has {len(ids)} tokens, not one")
    return [ids[0] for ids in encoded]


def _check_head(checkpoint: Checkpoint, model: Any, head: LabelHead, ids: Sequence[int]) -> None:
    tokens = mx.array([[*ids, *ids]])
    try:
        score: Any = head(model.model(tokens)[:, -1]).item()
        logits = model(tokens)[0, -1].astype(mx.float32)[mx.array(list(ids))]
        right: Any = (logits * mx.array([1.0, -1.0])[: len(ids)]).sum().item()
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise checkpoint.failed(f"its architecture gives no hidden states: {error}") from error
    digits = 1e-3 if floating_dtype(model) == mx.float32 else 5e-2
    scale: Any = mx.abs(logits).max().item()
    if not abs(score - right) <= digits * max(1.0, scale):
        raise checkpoint.failed("its logits are not its hidden states times its output matrix")
