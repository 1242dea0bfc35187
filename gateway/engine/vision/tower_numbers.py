"""The numbers of vision towers in config.json, read without mlx."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from gateway.engine.models.counts import MOST_WIDTH, text_config
from gateway.engine.vision.families import Family
from gateway.engine.vision.patches import CHANNELS, SOFT_TOKENS

Config: TypeAlias = Mapping[str, Any]

_TEXT_TYPES: Final = ("mistral", "ministral3", "llama")  # the decoders of Pixtral's families
_ROPES: Final = (None, "default", "axial")  # values of rope_type
_SIZES: Final = {
    "hidden": "hidden_size",
    "inner": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "patch": "patch_size",
}
_QWEN_SIZES: Final = {
    **_SIZES,
    "layers": "depth",
    "heads": "num_heads",
    "merge": "spatial_merge_size",
    "frames": "temporal_patch_size",
    "channels": "in_channels",
}
# transformers' defaults.
_QWEN_DEFAULTS: Final = {"in_channels": 3, "temporal_patch_size": 2, "spatial_merge_size": 2}
_QWEN2_5_DEFAULTS: Final = {
    **_QWEN_DEFAULTS,
    "depth": 32,
    "intermediate_size": 3420,
    "num_heads": 16,
    "patch_size": 14,
    "window_size": 112,
}
_QWEN2_5_FULL: Final = (7, 15, 23, 31)
_QWEN3_DEFAULTS: Final = {
    **_QWEN_DEFAULTS,
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "patch_size": 16,
}
_QWEN3_DEEPSTACK: Final = (8, 16, 24)
_PIXTRAL_DEFAULTS: Final = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_channels": CHANNELS,
    "patch_size": 16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerNumbers:
    """A tower's sizes. What only some families have comes after `eps`."""

    hidden: int
    inner: int  # the width of a layer's products
    layers: int
    heads: int
    head: int  # the width of a head
    patch: int  # pixels per side
    merge: int  # patches per side of a token
    output: int  # the decoder's hidden size
    channels: int = CHANNELS
    frames: int = 1  # equal frames in a patch
    activation: str
    theta: float
    eps: float
    positions: int = 0  # learned ones
    side: int | None = None  # pixels per side of every image
    deepstack: tuple[int, ...] = ()  # layers whose output is added to the decoder's first layers
    window: int = 0  # tokens per side
    full: tuple[int, ...] = ()  # layers that attend to the whole image, instead of windows
    has_merger: bool = False  # Mistral 3's projector has one
    has_bias: bool = False  # in the projector
    is_clipped: bool = False  # inputs and outputs of linear layers have bounds
    is_standardized: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for sizes that don't fit."""
        if self.channels != CHANNELS:
            raise ValueError(f"the channels of vision_config are {self.channels}, not {CHANNELS}")
        if self.channels * self.frames * self.patch**2 > MOST_WIDTH:
            raise ValueError("patch_size of vision_config is too large")
        if self.hidden * self.merge**2 > MOST_WIDTH:
            raise ValueError("spatial_merge_size of config.json is too large")

    def check_fit(self, patch: int, merge: int, frames: int, side: int | None) -> None:
        """Raises ValueError for an image processor with other numbers."""
        for name, own, other in (
            ("patch_size", self.patch, patch),
            ("the side of a token (merge_size)", self.merge, merge),
            ("temporal_patch_size", self.frames, frames),
            ("image_size", self.side, side),
        ):
            if own != other:
                raise ValueError(
                    f"{name} is {own} in vision_config, and {other} in the image processor"
                )


def _read_qwen3(config: Config) -> TowerNumbers:
    """Read the numbers of Qwen3-VL and Qwen3.5 to 3.8. Raises KeyError and ValueError."""
    vision, text = config["vision_config"], text_config(config)
    names = {**_QWEN_SIZES, "positions": "num_position_embeddings"}
    sizes = _read_tower(config, names, _QWEN3_DEFAULTS)
    usual = _QWEN3_DEEPSTACK if str(config["model_type"]).startswith("qwen3_vl") else ()
    deepstack = _read_layers(vision, "deepstack_visual_indexes", sizes["layers"], usual)
    if math.isqrt(sizes["positions"]) ** 2 != sizes["positions"]:
        raise ValueError("num_position_embeddings of vision_config is no square")
    if len(deepstack) > text["num_hidden_layers"]:
        raise ValueError("deepstack_visual_indexes are more than the decoder's layers")
    activation = _read_choice(vision, "hidden_act", "gelu_pytorch_tanh")
    return _make_qwen(config, sizes, activation=activation, deepstack=deepstack)


def _read_qwen2_5(config: Config) -> TowerNumbers:
    """Read the numbers of Qwen2.5-VL. Raises KeyError and ValueError."""
    vision = config["vision_config"]
    names = {**_QWEN_SIZES, "window": "window_size"}
    sizes = _read_tower(config, names, _QWEN2_5_DEFAULTS)
    full = _read_layers(vision, "fullatt_block_indexes", sizes["layers"], _QWEN2_5_FULL)
    if not full:
        raise ValueError("fullatt_block_indexes of vision_config name no layers")
    sizes["window"] //= sizes["merge"] * sizes["patch"]
    if not sizes["window"]:
        raise ValueError("window_size of vision_config is smaller than a token")
    activation = _read_choice(vision, "hidden_act", "silu")
    return _make_qwen(config, sizes, activation=activation, full=full)


def _read_pixtral(config: Config) -> TowerNumbers:
    """Read the numbers of Pixtral, Mistral 3 and Ministral 3. Raises KeyError and ValueError."""
    vision, text, kind = config["vision_config"], config["text_config"], config["model_type"]
    is_llava, is_merging = kind == "llava", kind == "mistral3"
    _read_choice(config, "projector_hidden_act", "gelu")
    _read_choice(config, "vision_feature_layer", -1, default=-2 if is_llava else -1)
    name = "vision_feature_select_strategy"
    _read_choice(config, name, "full", default="default" if is_llava else "full")
    _read_choice(text, "model_type", *_TEXT_TYPES)
    sizes = _read_tower(config, {**_SIZES, "channels": "num_channels"}, _PIXTRAL_DEFAULTS)
    merge: dict[str, Any] = {"merge": 1}
    if is_merging:
        merge = _read_sizes(config, {"merge": "spatial_merge_size"}, {"spatial_merge_size": 2})
    return TowerNumbers(
        **sizes,
        **merge,
        head=_divide(sizes, 4),
        activation=_read_choice(vision, "hidden_act", "gelu", "silu", "gelu_pytorch_tanh"),
        theta=_read_theta(vision, 10000.0),
        eps=_read_number(text, "rms_norm_eps") if is_merging else 1e-5,
        has_merger=is_merging,
        has_bias=bool(config.get("multimodal_projector_bias", not is_merging)),
    )


def _read_gemma3(config: Config) -> TowerNumbers:
    """Read the numbers of Gemma 3. Raises KeyError and ValueError."""
    vision = config["vision_config"]
    sizes = _read_tower(config, {**_SIZES, "side": "image_size"})
    tokens = _read_sizes(config, {"n": "mm_tokens_per_image"}, {"mm_tokens_per_image": 256})["n"]
    columns = sizes["side"] // sizes["patch"]  # columns of patches
    if columns < math.isqrt(tokens):
        raise ValueError("image_size of vision_config is too small for mm_tokens_per_image")
    return TowerNumbers(
        **sizes,
        head=_divide(sizes, 1),
        merge=columns // math.isqrt(tokens),
        positions=columns**2,
        activation=_read_choice(vision, "hidden_act", "gelu_pytorch_tanh"),
        theta=0.0,  # positions are learned
        eps=_read_number(vision, "layer_norm_eps", 1e-6),
    )


def _read_gemma4(config: Config) -> TowerNumbers:
    """Read the numbers of Gemma 4. Raises KeyError and ValueError."""
    vision = config["vision_config"]
    names = {
        **_SIZES,
        "head": "head_dim",
        "merge": "pooling_kernel_size",
        "positions": "position_embedding_size",
    }
    sizes = _read_tower(config, names)
    if sizes["head"] % 4:
        raise ValueError("head_dim of vision_config is no multiple of 4")
    if SOFT_TOKENS[-1] * sizes["merge"] > sizes["positions"]:
        raise ValueError("position_embedding_size of vision_config is too small for images")
    _read_choice(vision, "num_key_value_heads", sizes["heads"])
    return TowerNumbers(
        **sizes,
        activation=_read_choice(vision, "hidden_activation", "gelu_pytorch_tanh"),
        theta=_read_theta(vision, 100.0),
        eps=_read_number(vision, "rms_norm_eps", 1e-6),
        is_clipped=bool(vision.get("use_clipped_linears")),
        is_standardized=bool(vision.get("standardize")),
    )


_READERS: Final[Mapping[str, Callable[[Config], TowerNumbers]]] = {
    "qwen3": _read_qwen3,
    "qwen2_5": _read_qwen2_5,
    "mistral": _read_pixtral,
    "gemma3": _read_gemma3,
    "gemma4": _read_gemma4,
}


def read_numbers(config: Config, family: Family) -> TowerNumbers:
    """Read a tower's numbers. Raises KeyError, TypeError and ValueError."""
    vision = config["vision_config"]
    if not isinstance(vision, Mapping):
        raise ValueError(f"vision_config is {vision!r:.40}, no object")
    kind = vision.get("model_type")
    if family.vision_types and kind not in family.vision_types:
        raise ValueError(f"vision_config has the model_type {kind!r:.40}, which is not supported")
    return _READERS[family.name](config)


def _make_qwen(config: Config, sizes: dict[str, Any], **more: Any) -> TowerNumbers:
    text = text_config(config)
    _read_choice(config["vision_config"], "out_hidden_size", text["hidden_size"])
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    sections = rope.get("mrope_section") if isinstance(rope, Mapping) else None
    if not isinstance(sections, list) or [type(each) for each in sections] != [int] * 3:
        raise ValueError(f"mrope_section is {sections!r:.40}, not three numbers")
    theta = _read_theta(config["vision_config"], 10000.0)
    head = _divide(sizes, 4, "num_heads")
    return TowerNumbers(**sizes, head=head, theta=theta, eps=1e-6, **more)


def _read_tower(
    config: Config, names: Mapping[str, str], defaults: Config | None = None
) -> dict[str, Any]:
    output = _read_sizes(text_config(config), {"output": "hidden_size"})
    return output | _read_sizes(config["vision_config"], names, defaults)


def _read_sizes(
    config: Config, names: Mapping[str, str], defaults: Config | None = None
) -> dict[str, Any]:
    """Return numbers by the fields that `names` gives for a config's keys."""
    given = {**(defaults or {}), **config}
    for key in names.values():
        if type(given[key]) is not int or not 1 <= given[key] <= MOST_WIDTH:
            raise ValueError(f"{key} is {given[key]!r:.40}, no number from 1 to {MOST_WIDTH:,}")
    return {field: given[key] for field, key in names.items()}


def _read_layers(
    vision: Config, key: str, layers: int, default: tuple[int, ...]
) -> tuple[int, ...]:
    named = vision.get(key, [*default]) or []
    if not isinstance(named, list) or any(type(each) is not int for each in named):
        raise ValueError(f"{key} is no list of layers")
    if not {*named} <= {*range(layers)} or len({*named}) < len(named):
        raise ValueError(f"{key} of vision_config name no layers, or a layer twice")
    return tuple(named)


def _read_choice(config: Config, key: str, *known: Any, default: Any = None) -> Any:
    value = config.get(key, known[0] if default is None else default)
    if value not in known:
        raise ValueError(f"{key} is {value!r:.40}, not {' or '.join(map(repr, known))}")
    return value


def _read_number(config: Config, key: str, default: float | None = None) -> float:
    value = config[key] if default is None else config.get(key, default)
    if type(value) not in (int, float) or not 1e-20 <= value <= 1e20:
        raise ValueError(f"{key} is {value!r:.40}, no number to compute with")
    return float(value)


def _read_theta(vision: Config, default: float) -> float:
    rope = vision.get("rope_parameters") or vision
    if not isinstance(rope, Mapping):
        raise ValueError("rope_parameters of vision_config is no object")
    _read_choice(rope, "rope_type", *_ROPES)
    return _read_number(rope, "rope_theta", default)


def _divide(sizes: Mapping[str, int], least: int, key: str = "num_attention_heads") -> int:
    """Return the width of a head, a multiple of `least`."""
    if sizes["hidden"] % (least * sizes["heads"]):
        raise ValueError(f"hidden_size of vision_config is no multiple of {least} × {key}")
    return sizes["hidden"] // sizes["heads"]
