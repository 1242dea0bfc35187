"""The outputs besides a dense vector: weights of tokens, and a vector for each token."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from gateway.engine.device import Device
from gateway.engine.embedding.bert import (
    Bert,
    Dense,
    Norm,
    make_dense,
    make_norm,
    modern_name,
    read_activation,
)
from gateway.engine.embedding.modernbert import ModernBert
from gateway.engine.embedding.pooling import Projection, unit
from gateway.engine.models.checkpoint import Checkpoint, dequantize, fit_weights
from gateway.engine.models.encoder_kernels import Activation, arithmetic
from gateway.engine.models.torch_pickle import read_tensors
from gateway.jobs import TokenIds, Vectors
from gateway.jobs.embed import Output, SparseVector

# BGE-M3's heads beside its weights, each in a file of safetensors or of torch.save.
SPARSE, MULTI_VECTOR = "sparse_linear", "colbert_linear"
# Values in the configuration of sentence-transformers' SpladePooling, of which the first is usual.
_STRATEGIES: Final = {"max": False, "sum": True}
_LOGS: Final = {"relu": 1, "log1p_relu": 2}
_SUFFIXES: Final = (".safetensors", ".pt")


# Logits computed at once, which are rows times tokens times the vocabulary.
SLICE_LOGITS: Final = 1 << 23


@dataclass(frozen=True, slots=True)
class MaskedNames:
    """The names in transformers of a head that guesses masked tokens, and its activation's key."""

    dense: str
    norm: str
    out: str
    bias: str
    activation: str = ""  # always gelu


_OF_ROBERTA: Final = MaskedNames(
    "lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias"
)
# The keys are values of model_type in config.json.
MASKED_HEADS: Final = {
    "bert": MaskedNames(
        "cls.predictions.transform.dense",
        "cls.predictions.transform.LayerNorm",
        "cls.predictions.decoder",
        "cls.predictions.bias",
        "hidden_act",
    ),
    "roberta": _OF_ROBERTA,
    "xlm-roberta": _OF_ROBERTA,
    "camembert": _OF_ROBERTA,
    "modernbert": MaskedNames(
        "head.dense", "head.norm", "decoder", "decoder.bias", "classifier_activation"
    ),
}


class Head(Protocol):
    """The computation of one output from a text's hidden states."""

    def __call__(self, hidden: mx.array, counts: mx.array, mask: mx.array | None) -> mx.array:
        """Map (rows, tokens, dimensions) to float32 values, whose first axis is the rows."""

    def read(self, ids: TokenIds, values: Vectors) -> SparseVector | Vectors:
        """Return the output of a text from its ids and its row of the values."""


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """BGE-M3's sparse head: each token's weight, and of a token that comes twice the larger one.

    Source: FlagEmbedding, inference/embedder/encoder_only/m3.py, _process_token_weights.
    """

    linear: Dense
    specials: frozenset[int]  # tokens without a weight

    def __call__(self, hidden: mx.array, counts: mx.array, mask: mx.array | None) -> mx.array:
        return mx.maximum(self.linear(hidden.astype(mx.float32))[..., 0], 0)

    def read(self, ids: TokenIds, values: Vectors) -> SparseVector:
        tokens, places = np.unique(ids, return_inverse=True)
        weights = np.zeros(len(tokens), np.float32)
        with np.errstate(invalid="ignore"):
            np.maximum.at(weights, places, values[: len(ids)])
        weights[np.isin(tokens, list(self.specials))] = 0
        return above_zero(tokens, weights)


@dataclass(frozen=True, slots=True)
class TokenVectors:
    """A vector of length 1 for each token that `keep`, a function of a row's ids, is true at."""

    projections: Sequence[Projection]
    keep: Callable[[TokenIds], npt.NDArray[np.bool_]]
    dimensions: int

    def __call__(self, hidden: mx.array, counts: mx.array, mask: mx.array | None) -> mx.array:
        vectors = hidden.astype(mx.float32)
        for project in self.projections:
            vectors = project(vectors)
        return unit(vectors)

    def read(self, ids: TokenIds, values: Vectors) -> Vectors:
        return values[: len(ids)][self.keep(ids)]


@dataclass(frozen=True, slots=True)
class VocabularyWeights:
    """SPLADE: a weight for each token of the vocabulary, from the head that guesses masked tokens.

    Source: sentence-transformers, sparse_encoder/modules/splade_pooling.py.
    """

    dense: Dense
    activation: Activation
    norm: Norm
    out: Dense
    is_sum: bool  # True: a text's weight is the sum of its tokens'. False: the largest
    logarithms: int

    def __call__(self, hidden: mx.array, counts: mx.array, mask: mx.array | None) -> mx.array:
        rows, tokens, width = hidden.shape
        states = self.norm(self.activation(self.dense(hidden.reshape(-1, width))))
        states = states.reshape(hidden.shape)
        step = max(1, SLICE_LOGITS // (rows * self.out.weight.shape[1]))
        pooled = None
        for start in range(0, tokens, step):
            logits = self.out(states[:, start : start + step]).astype(mx.float32)
            if mask is not None:
                logits = mx.where(mask[:, start : start + step, None], logits, 0)
            part = self._squash(logits).sum(1) if self.is_sum else logits.max(1)
            if pooled is not None:
                part = pooled + part if self.is_sum else mx.maximum(pooled, part)
            pooled = part
            mx.async_eval(pooled)  # type: ignore[no-untyped-call]  # frees the logits
        assert pooled is not None
        return pooled if self.is_sum else self._squash(pooled)

    def read(self, ids: TokenIds, values: Vectors) -> SparseVector:
        return above_zero(np.arange(len(values)), values)

    def _squash(self, logits: mx.array) -> mx.array:
        weights = mx.maximum(logits, 0)
        for _ in range(self.logarithms):
            weights = mx.log1p(weights)
        return weights


def above_zero(tokens: npt.NDArray[Any], weights: npt.NDArray[np.float32]) -> SparseVector:
    """Return the weights above 0; those that are not finite stay, to be found."""
    is_kept = ~(weights <= 0)
    return SparseVector(tokens[is_kept].astype(np.int32), weights[is_kept])


def open_splade(
    checkpoint: Checkpoint,
    config: Mapping[str, Any],
    pooling: Mapping[str, Any],
    device: Device,
    encoder: object,
) -> VocabularyWeights:
    """Open SPLADE's head, whose `pooling` is SpladePooling's settings. Raises ModelLoadFailed."""
    names = MASKED_HEADS.get(config["model_type"])
    if names is None or not isinstance(encoder, Bert | ModernBert):
        raise checkpoint.failed(
            f"SPLADE of the architecture `{config['model_type']}` is not supported: "
            f"supported are {', '.join(MASKED_HEADS)}"
        )
    words = encoder.words
    kinds = {}
    for key, known_values in (("pooling_strategy", _STRATEGIES), ("activation_function", _LOGS)):
        kinds[key] = pooling.get(key, next(iter(known_values)))
        if kinds[key] not in known_values:
            raise checkpoint.failed(f"SpladePooling's {key} {kinds[key]!r:.60} is not supported")
    d, is_modern = words.shape[1], config["model_type"] == "modernbert"
    shapes: dict[str, tuple[int, ...]] = {
        f"{names.dense}.weight": (d, d),
        f"{names.norm}.weight": (d,),
    }
    if not is_modern or config.get("classifier_bias"):
        shapes[f"{names.dense}.bias"] = (d,)
    if not is_modern:
        shapes[f"{names.norm}.bias"] = (d,)
    if not is_modern or config.get("decoder_bias", True):
        shapes[names.bias] = words.shape[:1]
    if not config.get("tie_word_embeddings", True):
        shapes[f"{names.out}.weight"] = words.shape
    opened = dequantize(checkpoint, checkpoint.weights(), config.get("quantization") or {})
    arrays = {modern_name(n): a for n, a in opened.items() if modern_name(n) in shapes}
    weights = {n: a.astype(words.dtype) for n, a in fit_weights(checkpoint, arrays, shapes).items()}
    out = Dense(weights.get(f"{names.out}.weight", words).T, weights.get(names.bias))
    activation = read_activation(checkpoint, config if names.activation else {}, names.activation)
    choice = arithmetic(device, words.dtype, activation, d, heads=1)
    epsilon = float(config.get("norm_eps" if is_modern else "layer_norm_eps", 1e-5))
    norm = make_norm(weights, names.norm, choice, epsilon)
    return VocabularyWeights(
        make_dense(weights, names.dense),
        choice.activation,
        norm,
        out,
        _STRATEGIES[kinds["pooling_strategy"]],
        _LOGS[kinds["activation_function"]],
    )


def m3_files(folder: Checkpoint) -> dict[str, str]:
    """Return the names of BGE-M3's head files that a folder has, by the heads' names."""
    names = [(head, head + suffix) for suffix in _SUFFIXES for head in (SPARSE, MULTI_VECTOR)]
    return {head: name for head, name in reversed(names) if (folder.folder / name).is_file()}


def heads_bytes(folder: Checkpoint) -> int:
    """Estimate the bytes of BGE-M3's heads in memory: floats of 32 bits, for 16 in the files."""
    return sum(2 * (folder.folder / file).stat().st_size for file in m3_files(folder).values())


def open_m3_heads(
    folder: Checkpoint, dimensions: int, token_id: Callable[[str], int | None]
) -> dict[Output, Head]:
    """Open the heads that the folder has. Raises ModelLoadFailed."""
    heads: dict[Output, Head] = {}
    for head, file in m3_files(folder).items():
        linear = _read_linear(folder, file, dimensions, 1 if head == SPARSE else None)
        if head == SPARSE:
            heads["sparse"] = TokenWeights(linear, special_ids(folder, token_id))
        else:
            project = [Projection(linear, lambda x: x)]
            size = int(linear.weight.shape[1])
            heads["multi_vector"] = TokenVectors(project, lambda ids: np.arange(len(ids)) > 0, size)
    return {output: heads[output] for output in sorted(heads, reverse=True)}


def _read_linear(folder: Checkpoint, file: str, inputs: int, outputs: int | None) -> Dense:
    if file.endswith(".pt"):
        # A head has at most as many outputs as inputs; the rest is for names.
        arrays = read_tensors(folder, file, 8 * (inputs + 1) * inputs + (1 << 17))
    else:
        folder.header(file)
        with folder.blame(f"{file}: "):
            loaded: Any = mx.load(str(folder.folder / file))
            arrays = dict(loaded)
    rows = outputs or max((array.shape[0] for array in arrays.values() if array.ndim), default=0)
    if rows == 0:
        raise folder.failed(f"{file} has no outputs")
    shapes = {"weight": (rows, inputs), "bias": (rows,)}
    weights = fit_weights(folder, arrays, shapes)
    return make_dense({f"{file}.{n}": a.astype(mx.float32) for n, a in weights.items()}, file)


def special_ids(folder: Checkpoint, token_id: Callable[[str], int | None]) -> frozenset[int]:
    """Return the tokens that BGE-M3's sparse head gives no weight to."""
    files = ("special_tokens_map.json", "tokenizer_config.json")
    stated: Mapping[str, Any] = {
        k: v for file in files for k, v in folder.read_object(file).items()
    }
    tokens = [stated.get(f"{role}_token") for role in ("cls", "eos", "pad", "unk")]
    texts = [t.get("content") if isinstance(t, dict) else t for t in tokens]
    ids = frozenset(token_id(text) for text in texts if isinstance(text, str))
    if not ids or None in ids:
        raise folder.failed(
            f"{SPARSE} needs the cls, eos, pad and unk tokens of tokenizer_config.json, "
            "which names none or unknown ones"
        )
    return frozenset(token for token in ids if token is not None)
