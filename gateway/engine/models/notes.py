"""Notes on a model: the parts of its config that are ignored, and how its answers were verified."""

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


# Families in docs/architectures.md whose answers equal mlx-lm's (by the names of its modules) or
# transformers' (by `model_type`).
EQUAL: Final = _listed("equal_to_mlx_lm.txt")
_TRANSFORMERS: Final = _listed("equal_to_transformers.txt")


def list_notes(config: dict[str, Any], asked: int | None) -> list[str]:
    """List, in sentences, the parts of a config that a model with `asked` tokens of context
    ignores.
    """
    from gateway.engine.models.configs import classes_of  # importing mlx-lm takes a second
    from gateway.engine.models.unread import list_unread

    text, notes = text_config(config), list[str]()
    with contextlib.suppress(Exception):  # the load reports a faulty config
        for limit in list_limits(config):
            more = f"beyond {limit.tokens:,} tokens, `{limit.key}` of config.json is ignored"
            if asked is None:
                notes.append(f"{more}: the context ends there, unless `max_context:` raises it")
                break
            if asked > limit.tokens and limit.key == "long_factor":
                short = f"texts of up to {limit.tokens:,} are not rotated by `short_factor`"
                notes.append(f"`max_context:` allows {asked:,} tokens: {short}, and answers differ")
            elif asked > limit.tokens:
                notes.append(f"{more}, and `max_context:` allows {asked:,}: longer answers differ")
        keys = list_unread(text, classes_of(deepcopy(config))[0])
        if keys:
            notes.append(f"nothing reads {', '.join(f'`{key}`' for key in keys)} of config.json")
    return notes


def verified_by(config: Mapping[str, Any]) -> Verified:
    """Return the reference that the answers of a model's family were compared with."""
    kinds = {str(each.get("model_type")) for each in (config, text_config(config))}
    if kinds & _TRANSFORMERS:
        return "transformers"
    return "mlx-lm" if kinds & EQUAL else "no"
