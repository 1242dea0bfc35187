"""From a text's hidden states to its one vector: what the model's folder says, and the maths.

Pooling is never guessed: the wrong one gives plausible vectors that find the wrong texts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, cast, get_args

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from gateway.engine.models.checkpoint import Checkpoint, join_names

Mode = Literal["mean", "cls", "last"]
_MODES: Final = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
# sentence-transformers before 6: one boolean a mode.
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
    """What happens around the model: its subfolder, the pooling, whether to normalise."""

    transformer: str
    pooling: Mode
    normalize: bool


def read_recipe(checkpoint: Checkpoint, pooling: str | None, normalize: bool | None) -> Recipe:
    """Read modules.json and the modules' own files.

    `pooling` and `normalize` come from models.yaml; when given they win. What neither the
    folder nor models.yaml says is a load error that names the key to set.
    """
    if pooling is not None and pooling not in get_args(Mode):
        raise checkpoint.failed(f"`pooling:` in models.yaml is `{pooling}`, not mean, cls or last")
    paths = _modules(checkpoint)
    if pooling is None and "Pooling" in paths:
        pooling = _read_pooling(checkpoint.inside(paths["Pooling"]))
    if normalize is None and paths:
        normalize = "Normalize" in paths
    if pooling is None:
        raise checkpoint.failed(
            "its folder does not say how token vectors become one: "
            "set `pooling:` (mean, cls or last) in models.yaml"
        )
    if normalize is None:
        raise checkpoint.failed(
            "its folder does not say whether vectors are normalised: "
            "set `normalize:` (true or false) in models.yaml"
        )
    return Recipe(paths.get("Transformer", ""), cast(Mode, pooling), normalize)


def _modules(checkpoint: Checkpoint) -> dict[str, str]:
    """Return each module's path by its class name, in order; empty if there is no modules.json."""
    paths = checkpoint.read_modules()
    if paths is None:
        return {}
    names = list(paths)
    unknown = [n for n in names if n not in ("Transformer", "Pooling", "Normalize")]
    if unknown:
        raise checkpoint.failed(f"modules.json lists what is not supported: {join_names(unknown)}")
    if names not in (
        ["Transformer"],
        ["Transformer", "Pooling"],
        ["Transformer", "Pooling", "Normalize"],
    ):
        raise checkpoint.failed(f"modules.json lists modules in no known order: {', '.join(names)}")
    if "Normalize" in paths:
        config = checkpoint.inside(paths["Normalize"]).read_object("config.json")
        key = config.get("module_input_name", "sentence_embedding")
        if key != "sentence_embedding":
            raise checkpoint.failed(f"its Normalize module works on {key}, which is not supported")
    return paths


def _read_pooling(folder: Checkpoint) -> str:
    config: Mapping[str, Any] = folder.read_object("config.json")
    where = f"{folder.folder.name}/config.json"
    stated = config.get("pooling_mode", [m for k, m in _OLD_KEYS.items() if config.get(k)])
    modes = list(stated)
    if isinstance(stated, str):
        modes = [stated]
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


def pool(hidden: mx.array, lengths: mx.array, mask: mx.array | None, mode: Mode) -> mx.array:
    """Make one float32 vector of each row of (rows, tokens, dimensions), padded on the right.

    `lengths` counts each row's real tokens; `mask` is true at them, None when all are real.
    """
    hidden = hidden.astype(mx.float32)
    if mode == "cls":
        return hidden[:, 0]
    if mode == "last":
        return mx.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
    if mask is None:
        return mx.mean(hidden, axis=1)
    # A product with the mask adds up the real tokens faster than a masked sum does.
    summed = (mask.astype(mx.float32)[:, None, :] @ hidden)[:, 0]
    return summed / lengths[:, None].astype(mx.float32)


def unit(vectors: mx.array) -> mx.array:
    """Divide each row by its length, as torch.nn.functional.normalize does."""
    length = mx.sqrt(mx.sum(vectors * vectors, axis=-1, keepdims=True))
    return vectors / mx.maximum(length, 1e-12)


def shorten(
    vectors: npt.NDArray[np.float32], dimensions: int, *, normalize: bool = True
) -> npt.NDArray[np.float32]:
    """Keep the first dimensions of Matryoshka vectors and make them unit length again."""
    if not 1 <= dimensions <= vectors.shape[-1]:
        raise ValueError(f"dimensions must be from 1 to {vectors.shape[-1]}, not {dimensions}")
    shortened = vectors[..., :dimensions].copy()
    if normalize:
        length = np.linalg.norm(shortened, axis=-1, keepdims=True)
        shortened /= np.maximum(length, np.float32(1e-12))
    return shortened
