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

from benchmarks.architectures import REPOSITORY
from benchmarks.reference import configs, forms, keys
from benchmarks.reference.rows import BASE, Gap, Row, judged
from gateway.errors import ModelLoadFailed

TOKENS: Final = 70  # of the prompt: beyond a narrow window, and beyond a scaled rope's own context
PREFILL: Final = 40
LABELS: Final = 3  # of a reranker's head
GOLDEN: Final = REPOSITORY / "tests" / "golden"  # its rerankers' tokenizers
LONG: Final = ("dynamic", "longrope")  # ropes that turn by how much there is to read


class NotMade(Exception):
    """transformers refuses a config, or makes no model of it."""


@dataclasses.dataclass(frozen=True)
class Made:
    """transformers' side of a row."""

    config: Any
    model: Any
    prompt: list[int]
    logits: NDArray[np.float32]  # of each position

    def steps(self) -> NDArray[np.float32]:
        """Return the logits of the prefill's end and of each step after it."""
        from benchmarks.reference import torch_side

        if any(f'"{kind}"' in json.dumps(self.config.to_dict(), default=str) for kind in LONG):
            return torch_side.decoded(self.model, self.prompt, PREFILL)
        return self.logits[PREFILL - 1 :]


def try_out(line: str) -> dict[str, Any]:
    """Try a row, as Row.line() writes it; return what came of it."""
    row = Row(*json.loads(line))
    try:
        change = changes_of(row.architecture)[row.key]
        made = made_for(row.architecture, change.wanted)
        if row.key != BASE:
            beside = made_for(row.architecture, change.beside)
            if Gap.between(beside.logits, made.logits).first is None:
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
            return compared(made, row.architecture, folder)
        except ModelLoadFailed as error:
            return {"outcome": "refused", "reason": str(error)[:300]}
        except Exception as error:
            return {"outcome": "throws", "reason": f"{type(error).__name__}: {error}"[:300]}


@lru_cache(maxsize=1)
def changes_of(architecture: str) -> dict[str, keys.Change]:
    """Return what is changed in an architecture's config, by its name."""
    try:
        config = config_of(architecture, {})
    except NotMade:
        return {BASE: keys.Change()}
    return keys.changes(config.get_text_config().to_dict())


def split(architecture: str) -> tuple[str, str]:
    """Return a config's model_type, and the task: logits, or what its name says after a colon."""
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
    from benchmarks.reference import torch_side

    config = config_of(architecture, json.loads(changes))
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


def compared(made: Made, architecture: str, folder: Path) -> dict[str, Any]:
    """Open a folder as the gateway does, and compare. Raises ModelLoadFailed."""
    import mlx.core as mx

    from gateway.engine.models.checkpoint import Checkpoint

    mx.set_default_device(mx.cpu)
    _, task = split(architecture)
    if task == "logits":
        return _compared_decoder(made, Checkpoint("tiny", folder))
    answers = _vectors if task == "vectors" else _scores
    gap = Gap.between(made.logits, answers(made, Checkpoint("tiny", folder)))
    return judged(gap, gap)


def _compared_decoder(made: Made, checkpoint: Any) -> dict[str, Any]:
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    from gateway.engine.device import Device
    from gateway.engine.models.decoders import open_decoder

    def run(ids: list[int], cache: Any = None) -> NDArray[np.float32]:
        return np.array(model(mx.array([ids]), cache=cache)[0].astype(mx.float32))

    model, _ = open_decoder(checkpoint, device=Device.CPU, dtype=None)
    whole = Gap.between(made.logits, run(made.prompt))
    cache = make_prompt_cache(model)
    steps = [run(made.prompt[:PREFILL], cache)[-1:]]
    steps += [run([each], cache) for each in made.prompt[PREFILL:]]
    return judged(whole, Gap.between(made.steps(), np.concatenate(steps)))


def _vectors(made: Made, checkpoint: Any) -> NDArray[np.float32]:
    import mlx.core as mx

    from gateway.engine.device import Device
    from gateway.engine.embedding.engine import open_encoder

    encoder = open_encoder(checkpoint, checkpoint.read_object("config.json"), Device.CPU, None)
    *_, hidden = encoder(mx.array([made.prompt]), None)
    return np.array(hidden[0].astype(mx.float32))


def _scores(made: Made, checkpoint: Any) -> NDArray[np.float32]:
    from gateway.engine.device import Device
    from gateway.engine.embedding.cross_encoder import load_cross_encoder_in_steps
    from gateway.jobs import Pair

    kind = made.config.model_type
    golden = {"modernbert": "modernbert-cls-reranker", "bert": "bert-reranker"}
    for file in (GOLDEN / golden.get(kind, "xlm-roberta-reranker")).glob("tokenizer*.json"):
        (checkpoint.folder / file.name).write_bytes(file.read_bytes())
    loading = load_cross_encoder_in_steps(checkpoint.folder, name="tiny", device=Device.CPU)
    *_, engine = loading
    assert engine is not None
    pair = Pair(tuple(made.prompt), len(made.prompt))
    return np.array(engine.score([pair]), dtype=np.float32)
