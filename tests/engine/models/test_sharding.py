"""A rank's share of a model: as large as predicted, and refused by name where there is none."""

from pathlib import Path
from typing import Any

import pytest

from gateway.engine.device import Device
from gateway.engine.models.checkpoint import Checkpoint, kv_bytes, weights_bytes
from gateway.engine.models.decoders import Numbers, parameters, read_decoder
from gateway.engine.models.sharding import Parallel, RankShare, SharedListing
from gateway.errors import ModelLoadFailed
from tests.checkpoints import SLIDING, write_chat
from tests.engine.models.gguf.opening import ended


class FakeGroup:
    """A place among ranks that are not there: enough for all but a pass."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def share(parallel: Parallel, rank: int = 0, size: int = 2) -> RankShare:
    return RankShare(parallel, FakeGroup(rank, size))


def load(checkpoint: Checkpoint, its: RankShare) -> Any:
    return ended(read_decoder(checkpoint, device=Device.CPU, numbers=Numbers(), share=its))


@pytest.mark.parametrize(("layers", "ranks"), [(2, 2), (7, 3), (5, 2), (4, 4)])
def test_every_layer_is_in_one_stage(layers: int, ranks: int) -> None:
    stages = [share("pipeline", rank, ranks).layers(layers) for rank in range(ranks)]
    assert sorted(layer for stage in stages for layer in stage) == list(range(layers))
    assert stages[0][-1] == layers - 1
    assert len(stages[0]) == -(-layers // ranks)


@pytest.mark.parametrize("parallel", ["tensor", "pipeline"])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_size_of_a_share_is_known_before_it_is_loaded(
    parallel: Parallel, rank: int, tmp_path: Path
) -> None:
    checkpoint = Checkpoint("m", write_chat(tmp_path, model_type="qwen2", num_hidden_layers=3))
    its = share(parallel, rank)
    model = load(checkpoint, its)
    listing = SharedListing(checkpoint, its)
    held = sum(array.nbytes for array in parameters(model))
    predicted = weights_bytes(listing, Device.CPU, None)
    assert held <= predicted <= 1.02 * held
    assert predicted < weights_bytes(checkpoint, Device.CPU, None)
    part = {"tensor": (1, 1), "pipeline": (3 / 2, 1)}[parallel][rank]  # one layer more is counted
    assert (
        kv_bytes(listing, Device.CPU, None, 1)
        == part * kv_bytes(checkpoint, Device.CPU, None, 1) / 2
    )


@pytest.mark.parametrize(
    ("parallel", "config", "reason"),
    [
        ("pipeline", {}, "cannot divide a llama by `parallel: pipeline`; use `parallel: tensor`"),
        ("tensor", SLIDING, "no model of its kind can be divided"),
        ("tensor", {"num_key_value_heads": 1}, "its num_key_value_heads, 1, cannot be divided"),
        ("pipeline", {"model_type": "qwen2", "num_hidden_layers": 1}, "it has 1 layers, fewer"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused(
    parallel: Parallel, config: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    checkpoint = Checkpoint("m", write_chat(tmp_path, **config))
    with pytest.raises(ModelLoadFailed, match=reason):
        load(checkpoint, share(parallel))
