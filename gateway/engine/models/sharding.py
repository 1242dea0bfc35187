"""One model divided among processes: the ranks of a group that `mlx.launch` started.

Every rank must run the same passes, because the others wait for ever for a missing rank.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Protocol

import mlx.core as mx
import numpy as np

from gateway.engine.models.checkpoint import Checkpoint, Listing
from gateway.engine.models.counts import text_config
from gateway.engine.models.folder import Tensor
from gateway.errors import ModelLoadFailed

Parallel = Literal["tensor", "pipeline"]


class RankGroup(Protocol):
    """The processes that share a model, as in mlx.core.distributed.Group."""

    def rank(self) -> int: ...

    def size(self) -> int: ...


def join_group() -> RankGroup | None:
    """Wait for the other ranks and return their group; return None if this process is alone."""
    if "MLX_RANK" not in os.environ:  # mlx.launch sets it, except with MPI
        return None
    group: RankGroup = mx.distributed.init()
    if group.size() > 1:
        return group
    return None


def first_host() -> str:
    """Return rank 0's address from a variable of mlx's launch.py, or an empty string."""
    if "MLX_HOSTFILE" in os.environ:
        with open(os.environ["MLX_HOSTFILE"], encoding="utf-8") as hosts:
            return str(json.load(hosts)[0][0]).rpartition(":")[0]
    if "MLX_JACCL_COORDINATOR" in os.environ:
        return os.environ["MLX_JACCL_COORDINATOR"].rpartition(":")[0]
    return os.environ.get("NCCL_HOST_IP", "")


def share_bytes(group: RankGroup, data: bytes) -> bytes:
    """Return rank 0's data on every rank."""
    if group.rank() > 0:
        data = b""  # the sum below then equals rank 0's data
    size: Any = _sum(mx.array(len(data))).item()
    content = np.frombuffer(data.ljust(size, b"\0"), np.uint8)
    return np.asarray(_sum(mx.array(content))).tobytes()


def _sum(array: mx.array) -> mx.array:
    return mx.distributed.all_sum(array, stream=mx.cpu)


@dataclass(frozen=True, slots=True)
class RankShare:
    """The kind of parallelism that divides a model, and the group that shares the model."""

    parallel: Parallel
    group: RankGroup

    def layers(self, count: int) -> range:
        """Return this rank's layers. Rank 0 has the last layers, as in mlx-lm."""
        size, remainder = divmod(count, self.group.size())
        sizes = [size + (rank < remainder) for rank in range(self.group.size())]
        start = sum(sizes[self.group.rank() + 1 :])
        return range(start, start + sizes[self.group.rank()])


def shard(checkpoint: Checkpoint, model: Any, share: RankShare) -> None:
    """Reduce an mlx-lm model with unread weights to this rank's part. Raises ModelLoadFailed."""
    inner = getattr(model, "model", None)
    can = {"tensor": hasattr(model, "shard"), "pipeline": hasattr(inner, "pipeline")}
    if not can[share.parallel]:
        hints = [f"use `parallel: {name}`" for name, is_able in can.items() if is_able]
        raise checkpoint.failed(
            f"mlx-lm cannot divide a {checkpoint.config().get('model_type')} by "
            f"`parallel: {share.parallel}`; {(*hints, 'no model of its kind can be divided')[0]}"
        )
    _check_sizes(checkpoint, share)
    with checkpoint.blame():
        if inner is not None and share.parallel == "pipeline":
            inner.pipeline(share.group)
        else:
            model.shard(share.group)


def _check_sizes(checkpoint: Checkpoint, share: RankShare) -> None:
    config, ranks = text_config(checkpoint.config()), share.group.size()
    if share.parallel == "pipeline":
        layers = config.get("num_hidden_layers")
        if isinstance(layers, int) and layers < ranks:
            raise checkpoint.failed(f"it has {layers} layers, fewer than the {ranks} ranks")
        return
    for name in ("num_attention_heads", "num_key_value_heads"):
        count = config.get(name)
        if isinstance(count, int) and count % ranks:
            raise checkpoint.failed(f"its {name}, {count}, cannot be divided among {ranks} ranks")


class SharedListing:
    """The `Listing` of one rank's part of a model."""

    def __init__(self, whole: Listing, share: RankShare) -> None:
        self._whole = whole
        self._share = share

    def failed(self, reason: str) -> ModelLoadFailed:
        return self._whole.failed(reason)

    def config(self) -> Mapping[str, Any]:
        """Return the config with only this rank's KV heads or layers."""
        config = dict(text_config(self._whole.config()))
        ranks, heads = self._share.group.size(), config.get("num_attention_heads")
        quantization = self._whole.config().get("quantization")
        if quantization is not None:
            config["quantization"] = quantization
        if self._share.parallel == "pipeline":
            layers = config.get("num_hidden_layers")
            if isinstance(layers, int):
                config["num_hidden_layers"] = len(self._share.layers(layers))
        elif isinstance(heads, int) and heads:
            kv_heads = config.get("num_key_value_heads") or heads
            if not config.get("head_dim") and isinstance(config.get("hidden_size"), int):
                config["head_dim"] = config["hidden_size"] // heads
            config["num_key_value_heads"] = -(-kv_heads // ranks)
        return config

    def tensors(self) -> Mapping[str, Tensor]:
        listed = self._whole.tensors().items()
        cut = ((name, self._cut(name, tensor)) for name, tensor in listed)
        return {name: tensor for name, tensor in cut if tensor is not None}

    def _cut(self, name: str, tensor: Tensor) -> Tensor | None:
        _, layers, after = f".{name}".partition(".layers.")
        number = after.partition(".")[0]
        if not layers or not number.isdecimal():
            return tensor
        if self._share.parallel == "pipeline" and int(number) not in self._stage:
            return None
        if self._share.parallel == "pipeline" or len(tensor.shape) < 2:
            return tensor  # norms and biases stay whole
        ranks = self._share.group.size()
        shape = (-(-tensor.shape[0] // ranks), *tensor.shape[1:])
        return replace(tensor, shape=shape, nbytes=-(-tensor.nbytes // ranks))

    @cached_property
    def _stage(self) -> range:
        return self._share.layers(int(text_config(self._whole.config())["num_hidden_layers"]))
