"""Encoders by the `model_type` of config.json: one file per architecture."""

from collections.abc import Mapping
from typing import Any, Final

from gateway.engine.backend import Device
from gateway.engine.encoders.bert import Bert, read_config
from gateway.engine.encoders.roberta import Roberta
from gateway.engine.weights import Checkpoint

ENCODERS: Final[dict[str, type[Bert]]] = {
    "bert": Bert,
    "roberta": Roberta,
    "xlm-roberta": Roberta,
    "camembert": Roberta,
}


def load_encoder(
    checkpoint: Checkpoint, raw: Mapping[str, Any], device: Device, dtype: str | None
) -> Bert:
    """Load the encoder that config.json (`raw`) names; its model_type must be in ENCODERS."""
    return ENCODERS[raw["model_type"]](checkpoint, read_config(checkpoint, raw), device, dtype)
