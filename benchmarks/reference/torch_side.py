"""transformers' model of a row, with weights by seed, and its logits."""

import math
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
)

warnings.filterwarnings("ignore")
_logging: Any = transformers.logging
_logging.set_verbosity_error()
torch.set_num_threads(1)

GAIN = 1.6  # makes matrices large enough for each layer to change the logits


def build(config: Any, task: str) -> Any:
    """Return transformers' model of a config for a task, float32, its weights by their names."""
    model = _whole(config, task).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(drawn(name, weight))
        for name, buffer in model.named_buffers():
            if "bias" in name:
                buffer.copy_(0.1 * _normal(name, buffer))
    model.tie_weights()
    return model


def _whole(config: Any, task: str) -> Any:
    whole: Any = AutoModelForImageTextToText
    text: Any = AutoModelForCausalLM
    others: dict[str, Any] = {"vectors": AutoModel, "scores": AutoModelForSequenceClassification}
    if task in others:
        return others[task].from_config(config, attn_implementation="eager")
    kinds = [(text, config), (whole, config)]
    if hasattr(config, "text_config"):
        kinds = [(whole, config), (text, config.text_config)]
    kind, own = kinds[0]
    try:
        return kind.from_config(own, attn_implementation="eager")
    except (ValueError, ImportError):  # no such model, or towers that want another package
        kind, own = kinds[1]
        return kind.from_config(own, attn_implementation="eager")


def _normal(name: str, weight: Any) -> Any:
    seeded = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(weight.shape, generator=seeded)


def drawn(name: str, weight: Any) -> Any:
    """Return random values of a weight's shape; of the size that its part in a model asks for."""
    values, low = _normal(name, weight), name.lower()
    if "a_log" in low:
        return weight + 0.2 * values
    if "dt_bias" in low or low.endswith(".d"):
        return weight + 0.3 * values
    if "sinks" in low:
        return values
    if "correction_bias" in low or "expert_bias" in low:
        return 0.1 * values
    if weight.ndim < 2 or "norm" in low:
        mean = float(weight.float().mean())
        return (0.0 if abs(mean) < 0.05 else mean) + 0.25 * values
    if "embed" in low or "wte" in low:
        return 0.7 * values
    if "conv" in low:
        return 0.5 * values
    inputs = 128 if weight.ndim == 3 else weight.shape[-1]
    return GAIN * values / math.sqrt(inputs)


def answers(model: Any, ids: list[int], task: str) -> NDArray[np.float32]:
    """Return a prompt's logits or hidden states, (tokens, …), or its scores, (1, labels)."""
    cached = {"use_cache": False} if task == "logits" else {}
    with torch.no_grad():
        found = model(input_ids=torch.tensor([ids]), **cached)
    rows = found.last_hidden_state[0] if task == "vectors" else found.logits
    return np.asarray((rows[0] if task == "logits" else rows).float().numpy())


def decoded(model: Any, ids: list[int], prefill: int) -> NDArray[np.float32]:
    """Return the logits from a prefill's last position on, each of a step of its own."""
    rows, kept = [], None
    with torch.no_grad():
        for part in (ids[:prefill], *([each] for each in ids[prefill:])):
            found = model(input_ids=torch.tensor([part]), past_key_values=kept, use_cache=True)
            kept = found.past_key_values
            rows.append(found.logits[0, -1].float().numpy())
    return np.stack(rows)


def save(model: Any, folder: Path) -> None:
    """Write config.json and safetensors as transformers 5 does."""
    model.save_pretrained(folder)
