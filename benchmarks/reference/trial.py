"""One row: transformers' model and the gateway's, from the same files, compared."""

import dataclasses
import json
import random
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.reference import configs, forms, keys
from benchmarks.reference.rows import BASE, Gap, Row, judged
from gateway.errors import ModelLoadFailed

TOKENS: Final = 70  # longer than a narrow window, and than a scaled rope's own context
PREFILL: Final = 40
LABELS: Final = 3  # a reranker's scores
LONG: Final = ("dynamic", "longrope")  # ropes that turn by how much there is to read


class NotMade(Exception):
    """transformers refuses a config, or makes no model of it."""


@dataclasses.dataclass(frozen=True)
class Made:
    """transformers' side of a row."""

    config: Any
    model: Any
    prompt: list[int]
    answers: NDArray[np.float32]  # a row for each position; a reranker has one

    def cut(self, tokens: int, task: str) -> "Made":
        """Return the same of the prompt's first tokens."""
        from benchmarks.reference import torch_side

        prompt = self.prompt[:tokens]
        answers = torch_side.answers(self.model, prompt, task)
        return dataclasses.replace(self, prompt=prompt, answers=answers)

    def steps(self, prefill: int) -> NDArray[np.float32]:
        """Return the logits of a prefill's end and of each step after it."""
        from benchmarks.reference import torch_side

        said = json.dumps(self.config.to_dict(), default=str)
        if any(f'"{kind}"' in said for kind in LONG):
            return torch_side.decoded(self.model, self.prompt, prefill)
        return self.answers[prefill - 1 :]


def try_out(line: str) -> dict[str, Any]:
    """Try a row, as Row.line() writes it; return the outcome."""
    row = Row(*json.loads(line))
    try:
        change = changes_of(row.architecture)[row.key]
        made = made_for(row.architecture, change.wanted)
        if row.key != BASE:
            beside = made_for(row.architecture, change.beside)
            if Gap.between(beside.answers, made.answers).first is None:
                return {"outcome": "unseen"}
    except NotMade as error:
        return {"outcome": "not made", "reason": str(error)[:300]}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        try:
            write(made, row, folder)
        except forms.NotWritten as error:
            return {"outcome": "not made", "reason": str(error)}
        try:
            return compared(made, split(row.architecture)[1], folder)
        except ModelLoadFailed as error:
            return {"outcome": "refused", "reason": str(error)[:300]}
        except Exception as error:
            return {"outcome": "throws", "reason": f"{type(error).__name__}: {error}"[:300]}


@lru_cache(maxsize=1)
def changes_of(architecture: str) -> dict[str, keys.Change]:
    """Return an architecture's changes by their names."""
    return keys.changes(fields_of(architecture))


def fields_of(architecture: str) -> dict[str, Any]:
    """Return the keys of an architecture's small config; none where transformers makes none."""
    try:
        fields: dict[str, Any] = config_of(architecture, {}).get_text_config().to_dict()
    except NotMade:
        return {}
    return fields


def split(architecture: str) -> tuple[str, str]:
    """Return a config's model_type, and the task after the name's colon, or logits."""
    kind, _, task = architecture.partition(":")
    return kind, task or "logits"


def config_of(architecture: str, changes: dict[str, Any]) -> Any:
    """Return transformers' config. Raises NotMade."""
    from transformers import CONFIG_MAPPING

    try:
        kind, task = split(architecture)
        labels = {"num_labels": LABELS} if task == "scores" else {}
        return configs.tiny(CONFIG_MAPPING[kind], **labels, **changes)
    except Exception as error:
        raise NotMade(f"{type(error).__name__}: {error}") from error


def made_for(architecture: str, changes: dict[str, Any]) -> Made:
    """Return transformers' model of a config with some keys changed. Raises NotMade."""
    return _made(architecture, json.dumps(changes, sort_keys=True))


@lru_cache(maxsize=6)
def _made(architecture: str, changes: str) -> Made:
    config = config_of(architecture, json.loads(changes))
    from benchmarks.reference import torch_side  # once there is something to make

    drawn = random.Random(5)
    prompt = [drawn.randrange(3, configs.VOCABULARY) for _ in range(TOKENS)]
    try:
        _, task = split(architecture)
        model = torch_side.build(config, task)
        found = torch_side.answers(model, prompt, task)
    except Exception as error:
        raise NotMade(f"{type(error).__name__}: {error}") from error
    if not np.isfinite(found).all():
        raise NotMade("its logits are not finite")
    return Made(config, model, prompt, found)


def write(made: Made, row: Row, folder: Path) -> None:
    """Write a model's files in one of the forms."""
    from benchmarks.reference import torch_side

    torch_side.save(made.model, folder)
    place = folder / "config.json"
    config = json.loads(place.read_text(encoding="utf-8"))
    if config["model_type"] == f"{row.architecture}_text":  # its towers want another package
        config = {"model_type": row.architecture, "text_config": config}
        forms.rename(folder, lambda name: name.replace("model.", "model.language_model.", 1))
    if config["model_type"] in ("gemma3", "gemma3n", "gemma4", "gemma4_unified"):
        config["vocab_size"] = configs.VOCABULARY  # mlx-lm's default is right of originals alone
    if row.form == "hub":
        config = forms.as_original(config, made.config)
        forms.rewrite_weights(config["model_type"], folder)
    place.write_text(json.dumps(config), encoding="utf-8")


def compared(made: Made, task: str, folder: Path) -> dict[str, Any]:
    """Open a folder as the gateway does, and compare. Raises ModelLoadFailed."""
    from benchmarks.reference.our_side import open_model

    ours = open_model(folder, made.config, task)
    limit = {}
    if ours.context is not None and ours.context < len(made.prompt):
        # A prompt of the whole context would leave no room for an answer.
        made, limit = made.cut(ours.context - 1, task), {"context": ours.context}
    whole = Gap.between(made.answers, ours.answers(made.prompt))
    prefill = min(PREFILL, len(made.prompt) // 2)
    steps = whole
    if ours.steps is not None:
        steps = Gap.between(made.steps(prefill), ours.steps(made.prompt, prefill))
    found = {**judged(whole, steps), **limit}
    if limit and found["outcome"] == "equal":
        found["outcome"] = "limited"
    return found
