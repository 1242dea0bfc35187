"""What of a model's files is not followed, and what its family's answers were compared with."""

import contextlib
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, Final

from gateway.engine.models.context import list_limits
from gateway.engine.models.counts import text_config
from gateway.jobs.steps import Verified


def _listed(file: str) -> frozenset[str]:
    return frozenset(Path(__file__).with_name(file).read_text(encoding="utf-8").split())


# Those that docs/architectures.md found equal in all: by the names of mlx-lm's modules, and by the
# families' `model_type`.
EQUAL: Final = _listed("equal_to_mlx_lm.txt")
_TRANSFORMERS: Final = _listed("equal_to_transformers.txt")


def list_notes(config: dict[str, Any], asked: int | None) -> list[str]:
    """List, in sentences, what of a config is not followed by a model that answers contexts of
    `asked` tokens, or of as many as its own limits let it.
    """
    from gateway.engine.models.configs import classes_of  # mlx-lm takes a second
    from gateway.engine.models.unread import list_unread

    text, notes = text_config(config), list[str]()
    with contextlib.suppress(Exception):  # the load says what is wrong
        for limit in list_limits(config):
            more = f"beyond {limit.tokens:,} tokens, `{limit.key}` is not as config.json says"
            if asked is None:
                notes.append(f"{more}: the context ends there, unless `max_context:` raises it")
                break
            if asked > limit.tokens and limit.key == "long_factor":  # for all texts, by `ropes`
                short = f"texts of up to {limit.tokens:,} are not rotated by `short_factor`"
                notes.append(f"`max_context:` allows {asked:,} tokens: {short}, and answers differ")
            elif asked > limit.tokens:
                notes.append(f"{more}, and `max_context:` allows {asked:,}: longer answers differ")
        keys = list_unread(text, classes_of(deepcopy(config))[0])
        if keys:
            notes.append(f"nothing reads {', '.join(f'`{key}`' for key in keys)} of config.json")
    return notes


def verified_by(config: Mapping[str, Any]) -> Verified:
    """Return what the answers of a model's family were compared with, by the `model_type` of its
    config or of the language model in it.
    """
    kinds = {str(each.get("model_type")) for each in (config, text_config(config))}
    if kinds & _TRANSFORMERS:
        return "transformers"
    return "mlx-lm" if kinds & EQUAL else "no"
