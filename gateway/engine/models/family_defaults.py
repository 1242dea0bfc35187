"""transformers' default values, by model family, for keys that a config.json lacks."""

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, Final

# Keys of rotary positions: the key of transformers 5, then older keys that it still reads.
ROPE_KEYS: Final = {"rope_parameters", "rope_theta", "rope_scaling"} | {
    "partial_rotary_factor",
    "rope_local_base_freq",
}


def family(config: Mapping[str, Any]) -> str:
    """Return transformers' `model_type` for a language model's config."""
    is_flat = "vision_config" in config and "text_config" not in config
    return f"{config.get('model_type')}{'_text' if is_flat else ''}"


def resolve(config: Mapping[str, Any]) -> tuple[Mapping[str, str], Mapping[str, Any]]:
    """Return transformers' aliases of a family's keys, and the config completed with defaults.

    Both are empty for a family without a class in transformers; the completed config is empty if
    the class refuses it.
    """
    known = _config_class(family(config))
    if known is None:
        return {}, {}
    aliases: dict[str, str] = dict(known.attribute_map)
    # Keys of all families are left out, because a file may state huge sizes there.
    names = {field.name for field in fields(known)} - _common_names() | ROPE_KEYS
    names |= {*aliases.keys(), *aliases.values()}
    names -= {"text_config", "vision_config", "audio_config"}
    given = {key: value for key, value in config.items() if key in names}
    scaling = given.pop("rope_scaling", None)
    if scaling:
        theta = {"rope_theta": given.get("rope_theta")} if given.get("rope_theta") else {}
        kind = scaling.get("rope_type") or scaling.get("type")
        given.setdefault("rope_parameters", {**scaling, **theta, "rope_type": kind})
    for field in fields(known):  # transformers requires the default's type
        default: Any = field.default
        if type(default) in (bool, float) and type(given.get(field.name)) in (bool, int):
            given[field.name] = type(default)(given[field.name])
    with contextlib.suppress(Exception):  # wrong values are refused where they are read
        return aliases, known(**given).to_dict()
    return aliases, {}


def is_default(text: Mapping[str, Any], key: str) -> bool:
    is_known, default = default_of(text, key)
    if not is_known or text[key] == default or (default is None and text[key] == []):
        return True
    rest = {name: value for name, value in text.items() if name != key}
    return bool(resolve(rest)[1].get(key) == text[key])


def default_of(text: Mapping[str, Any], key: str) -> tuple[bool, Any]:
    """Return whether transformers' class for a family has a key, and the key's default."""
    known = _config_class(family(text))
    for field in () if known is None else fields(known):
        if field.name == key and key not in _common_names():
            made: Any = field.default_factory
            return True, field.default if made is MISSING else made()
    return False, None


@cache
def _config_class(kind: str) -> Any:
    import transformers

    known: Any = transformers.CONFIG_MAPPING
    # Nobody can act on transformers' warnings about token ids and old keys.
    logging.getLogger("transformers.configuration_utils").setLevel(logging.ERROR)
    logging.getLogger("transformers.modeling_rope_utils").setLevel(logging.ERROR)
    logging.getLogger("transformers.models").setLevel(logging.ERROR)
    try:
        return known[kind]
    except KeyError:
        return None


@cache
def _common_names() -> frozenset[str]:
    from transformers import PretrainedConfig

    return frozenset(field.name for field in fields(PretrainedConfig))
