"""The steps from a text's hidden states to its vector.

Pooling is never guessed: a wrong one gives plausible vectors that find the wrong texts.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from gateway.engine.embedding.bert import Dense, make_dense
from gateway.engine.models.checkpoint import Checkpoint, dequantize, fit_weights
from gateway.engine.models.encoder_kernels import Activation
from gateway.engine.models.folder import join_names

INSIDE: Final = "dense."  # prefix of linear layers in the model's own weight file
_VECTOR, _TOKENS = "sentence_embedding", "token_embeddings"
# The keys are values of `activation_function` in a Dense module's config.
_ACTIVATIONS: Final[Mapping[str, Activation]] = {
    "torch.nn.modules.linear.Identity": lambda x: x,
    "torch.nn.modules.activation.Tanh": mx.tanh,
}
_ORDER: Final = "(Transformer( Pooling( Dense)*( Normalize)?)?)?|(MLM)?Transformer SpladePooling"
_COLBERT_ORDER: Final = "(Transformer( Dense)*( MultiVectorMask Normalize)?)?"
_MODULES: Final = (
    *("Transformer", "Pooling", "Dense", "Normalize"),
    *("MLMTransformer", "SpladePooling", "MultiVectorMask"),
)
Mode = Literal["mean", "cls", "last", "splade", "tokens"]
STATED: Final = ("mean", "cls", "last", "splade")  # `pooling:` in models.yaml
_MODES: Final = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
# sentence-transformers before version 6 had a boolean for each mode.
_OLD_KEYS: Final = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """The steps that turn a text's tokens into its vector."""

    transformer: str  # the model's subfolder
    pooling: Mode
    normalize: bool
    dense: Sequence[str] = ()  # subfolders of the linear layers after the pooling
    head: str | None = None  # the subfolder of SPLADE's pooling, or of ColBERT's mask


def read_recipe(checkpoint: Checkpoint, pooling: str | None, normalize: bool | None) -> Recipe:
    """Read the recipe; `pooling` and `normalize` override the files. Raises ModelLoadFailed."""
    if pooling is not None and pooling not in STATED:
        raise checkpoint.failed(
            f"`pooling:` in models.yaml is `{pooling}`, not mean, cls, last or splade"
        )
    modules = _modules(checkpoint)
    paths = dict(modules)
    if "SpladePooling" in paths and pooling in (None, "splade"):
        return Recipe(modules[0][1], "splade", False, head=paths["SpladePooling"])
    if has_token_vectors(checkpoint, paths):
        if pooling is not None:
            raise checkpoint.failed(
                "it is a ColBERT, which `pooling:` in models.yaml cannot change"
            )
        dense = [path for name, path in modules if name == "Dense"]
        transformer = paths.get("Transformer", "")
        return Recipe(transformer, "tokens", True, dense, paths.get("MultiVectorMask"))
    if pooling == "splade" and not modules:
        return Recipe("", "splade", False)
    if pooling is None and "Pooling" in paths:
        pooling = _read_pooling(checkpoint.inside(paths["Pooling"]))
    if normalize is None and paths:
        normalize = "Normalize" in paths
    if pooling is None:
        raise checkpoint.failed(
            "its folder does not say how token vectors become one vector: "
            "set `pooling:` (mean, cls, last or splade) in models.yaml"
        )
    if normalize is None:
        raise checkpoint.failed(
            "its folder does not say whether vectors are normalized: "
            "set `normalize:` (true or false) in models.yaml"
        )
    dense = [path for name, path in modules if name == "Dense"]
    return Recipe(paths.get("Transformer", ""), cast(Mode, pooling), normalize, dense)


def has_token_vectors(checkpoint: Checkpoint, modules: Mapping[str, str]) -> bool:
    """Return True for a ColBERT, as PyLate, sentence-transformers or colbert-ir save it."""
    if not modules:
        return "HF_ColBERT" in (checkpoint.config().get("architectures") or ())
    saved = checkpoint.read_object("config_sentence_transformers.json")
    return "MultiVectorMask" in modules or "query_prefix" in saved


def weight_folders(
    checkpoint: Checkpoint, pooling: str | None, normalize: bool | None
) -> list[Checkpoint]:
    recipe = read_recipe(checkpoint, pooling, normalize)
    dense = [checkpoint.inside(path) for path in recipe.dense]
    return [checkpoint.inside(recipe.transformer), *(d for d in dense if d.folder.is_dir())]


def _modules(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    modules = checkpoint.read_modules() or []
    names = [name for name, _ in modules]
    unknown = [name for name in names if name not in _MODULES]
    if unknown:
        raise checkpoint.failed(f"modules.json lists unsupported modules: {join_names(unknown)}")
    is_colbert = has_token_vectors(checkpoint, dict(modules))
    if not re.fullmatch(_COLBERT_ORDER if is_colbert else _ORDER, " ".join(names)):
        raise checkpoint.failed(f"modules.json lists modules in no known order: {', '.join(names)}")
    vector = _TOKENS if is_colbert else _VECTOR
    for name, path in modules:
        config = checkpoint.inside(path).read_object("config.json")
        for key in ("module_input_name", "module_output_name"):
            works_on = config.get(key) or vector
            if name in ("Dense", "Normalize") and works_on != vector:
                raise checkpoint.failed(
                    f"its {name} module works on {works_on}, which is not supported"
                )
    return modules


def _read_pooling(folder: Checkpoint) -> str:
    config: Mapping[str, Any] = folder.read_object("config.json")
    where = f"{folder.folder.name}/config.json"
    stated = config.get("pooling_mode", [m for k, m in _OLD_KEYS.items() if config.get(k)])
    modes = [stated] if isinstance(stated, str) else list(stated)
    if len(modes) != 1:
        raise folder.failed(
            f"{where} names {len(modes)} pooling modes ({join_names(modes)}), "
            "where one is supported"
        )
    if modes[0] not in _MODES:
        raise folder.failed(f"{where}: pooling `{modes[0]}` is none of {', '.join(_MODES)}")
    if config.get("include_prompt") is False:
        raise folder.failed(f"{where}: include_prompt: false is not supported")
    return _MODES[modes[0]]


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear layer after the pooling, in float32."""

    dense: Dense
    activation: Activation

    def __call__(self, vectors: mx.array) -> mx.array:
        return self.activation(self.dense(vectors))


def read_projections(checkpoint: Checkpoint, recipe: Recipe, dimensions: int) -> list[Projection]:
    """Open the linear layers after the pooling. Raises ModelLoadFailed."""
    inside = "linear." if recipe.pooling == "tokens" else INSIDE
    layers = _projections_inside(checkpoint.inside(recipe.transformer), inside)
    if not layers:
        layers = [_read_projection(checkpoint.inside(path)) for path in recipe.dense]
    for layer in layers:
        inputs, outputs = layer.dense.weight.shape
        if inputs != dimensions:
            raise checkpoint.failed(
                f"a linear layer after the pooling has {inputs} inputs, where vectors have "
                f"{dimensions} dimensions"
            )
        dimensions = outputs
    return layers


def _read_projection(folder: Checkpoint) -> Projection:
    config = folder.read_object("config.json")
    name = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    if name not in _ACTIVATIONS:
        raise folder.failed(f"its Dense module's activation, {name}, is not supported")
    if config.get("use_residual"):
        raise folder.failed("its Dense module's use_residual is not supported")
    with folder.reading_config():
        shape = int(config["out_features"]), int(config["in_features"])
    shapes: dict[str, tuple[int, ...]] = {"linear.weight": shape}
    if config.get("bias", True):
        shapes["linear.bias"] = shape[:1]
    return _projection(fit_weights(folder, folder.weights(), shapes), "linear", name)


def _projections_inside(transformer: Checkpoint, inside: str) -> list[Projection]:
    """Open linear layers in the model's own weight file, as mlx-embeddings and colbert-ir do."""
    named = {n: a for n, a in transformer.weights().items() if n.startswith(inside)}
    arrays = dequantize(transformer, named, transformer.config().get("quantization") or {})
    with transformer.blame():
        return [
            _projection(arrays, module, "torch.nn.modules.linear.Identity")
            for module in sorted({name.rpartition(".")[0] for name in arrays})
        ]


def _projection(weights: Mapping[str, mx.array], module: str, activation: str) -> Projection:
    arrays = {name: array.astype(mx.float32) for name, array in weights.items()}
    return Projection(make_dense(arrays, module), _ACTIVATIONS[activation])


def pool(hidden: mx.array, lengths: mx.array, mask: mx.array | None, mode: Mode) -> mx.array:
    """Pool each row of (rows, tokens, dimensions), padded on the right, to a float32 vector.

    `lengths` are the numbers of real tokens, where `mask` is true.
    """
    hidden = hidden.astype(mx.float32)
    if mode == "cls":
        return hidden[:, 0]
    if mode == "last":
        return mx.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
    if mask is None:
        return mx.mean(hidden, axis=1)
    # This product is faster than a masked sum.
    summed = (mask.astype(mx.float32)[:, None, :] @ hidden)[:, 0]
    return summed / lengths[:, None].astype(mx.float32)


def unit(vectors: mx.array) -> mx.array:
    """Divide each row by its length, as torch.nn.functional.normalize does."""
    length = mx.sqrt(mx.sum(vectors * vectors, axis=-1, keepdims=True))
    return vectors / mx.maximum(length, 1e-12)


def shorten(
    vectors: npt.NDArray[np.float32], dimensions: int, *, normalize: bool = True
) -> npt.NDArray[np.float32]:
    """Keep the first dimensions of Matryoshka vectors, normalized again if `normalize`."""
    if not 1 <= dimensions <= vectors.shape[-1]:
        raise ValueError(f"dimensions must be from 1 to {vectors.shape[-1]}, not {dimensions}")
    shortened = vectors[..., :dimensions].copy()
    if normalize:
        length = np.linalg.norm(shortened, axis=-1, keepdims=True)
        shortened /= np.maximum(length, np.float32(1e-12))
    return shortened
