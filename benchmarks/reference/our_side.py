"""The gateway's model of a row, opened from files, and its answers."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray

from benchmarks.architectures import REPOSITORY
from gateway.engine.device import Device
from gateway.engine.embedding.cross_encoder import load_cross_encoder_in_steps
from gateway.engine.embedding.engine import open_encoder
from gateway.engine.models.checkpoint import Checkpoint
from gateway.engine.models.context import read_context
from gateway.engine.models.decoders import open_decoder
from gateway.jobs.rerank import Pair

GOLDEN: Final = REPOSITORY / "tests" / "golden"
TOKENIZERS: Final = {"bert": "bert-reranker", "modernbert": "modernbert-cls-reranker"}
Answers = NDArray[np.float32]

mx.set_default_device(mx.cpu)


@dataclass(frozen=True)
class Opened:
    """A model as the gateway opens it."""

    context: int | None  # tokens that it may be asked, if there is a limit
    answers: Callable[[list[int]], Answers]  # (tokens, …), or (1, labels)
    # The rows from the end of a prefill on: the prompt, and the prefill's number of tokens.
    steps: Callable[[list[int], int], Answers] | None = None


def open_model(folder: Path, config: Any, task: str) -> Opened:
    """Open a folder for a task. Raises ModelLoadFailed."""
    checkpoint = Checkpoint("tiny", folder)
    if task == "vectors":
        return _open_encoder(checkpoint)
    if task == "scores":
        return _open_reranker(checkpoint, config.model_type)
    return _open_decoder(checkpoint)


def _open_decoder(checkpoint: Checkpoint) -> Opened:
    context = read_context(checkpoint.folder, None)
    model, _ = open_decoder(checkpoint, device=Device.CPU, dtype=None, context=context)

    def answers(ids: list[int], cache: Any = None) -> Answers:
        cache = cache or make_prompt_cache(model)  # the engine always has one
        return np.array(model(mx.array([ids]), cache=cache)[0].astype(mx.float32))

    def steps(ids: list[int], prefill: int) -> Answers:
        cache = make_prompt_cache(model)
        rows = [answers(ids[:prefill], cache)[-1:]]
        rows += [answers([each], cache) for each in ids[prefill:]]
        return np.concatenate(rows)

    return Opened(context, answers, steps)


def _open_encoder(checkpoint: Checkpoint) -> Opened:
    encoder = open_encoder(checkpoint, checkpoint.read_object("config.json"), Device.CPU, None)

    def answers(ids: list[int]) -> Answers:
        *_, hidden = encoder(mx.array([ids]), None)
        return np.array(hidden[0].astype(mx.float32))

    return Opened(encoder.max_tokens, answers)


def _open_reranker(checkpoint: Checkpoint, kind: str) -> Opened:
    # Ids are asked, so any tokenizer that has the special tokens does.
    golden = GOLDEN / TOKENIZERS.get(kind, "xlm-roberta-reranker")
    for file in golden.glob("tokenizer*.json"):
        (checkpoint.folder / file.name).write_bytes(file.read_bytes())
    *_, engine = load_cross_encoder_in_steps(checkpoint.folder, name="tiny", device=Device.CPU)
    assert engine is not None

    def answers(ids: list[int]) -> Answers:
        return np.array(engine.score([Pair(tuple(ids), len(ids))]), dtype=np.float32)

    return Opened(engine.max_tokens, answers)
