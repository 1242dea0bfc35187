"""One model over several processes, the ranks of a group that `mlx.launch` started.

Tensor parallelism divides each layer's matrices, pipelining the layers; mlx-lm's models do both by
themselves. A pass is a collective: each rank must make the same one, or the others wait for ever.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Protocol

import mlx.core as mx
import numpy as np

from gateway.engine.models.checkpoint import Checkpoint, Listing, Tensor
from gateway.errors import ModelLoadFailed

Parallel = Literal["tensor", "pipeline"]


class Group(Protocol):
    """The processes that share a model: mlx's group."""

    def rank(self) -> int:
        """Return this process's place."""

    def size(self) -> int:
        """Count the processes."""


def join_group() -> Group | None:
    """Return the group that this process was started in; None if it is alone.

    `mlx.launch` sets MLX_RANK for all its backends but MPI. Waits for the other ranks.
    """
    if "MLX_RANK" not in os.environ:
        return None
    group: Group = mx.distributed.init()
    return group if group.size() > 1 else None


def first_host() -> str:
    """Return the address of rank 0 as mlx.launch tells it to every rank; empty if it does not.

    By backend: ring's file lists each rank's addresses, JACCL has a coordinator and NCCL a host
    (launch.py of mlx's distributed tools).
    """
    if file := os.environ.get("MLX_HOSTFILE"):
        with open(file, encoding="utf-8") as hosts:
            return str(json.load(hosts)[0][0]).rpartition(":")[0]
    if coordinator := os.environ.get("MLX_JACCL_COORDINATOR"):
        return coordinator.rpartition(":")[0]
    return os.environ.get("NCCL_HOST_IP", "")


def share_bytes(group: Group, data: bytes) -> bytes:
    """Return rank 0's data, on every rank. What the others pass is ignored."""
    is_first = group.rank() == 0
    size: Any = _sum(mx.array(len(data) if is_first else 0)).item()
    sent = np.frombuffer(data, np.uint8) if is_first else np.zeros(size, np.uint8)
    return np.asarray(_sum(mx.array(sent))).tobytes()


def _sum(array: mx.array) -> mx.array:
    return mx.distributed.all_sum(array, stream=mx.cpu)


@dataclass(frozen=True, slots=True)
class Share:
    """How a model is divided, and among which ranks."""

    parallel: Parallel
    group: Group

    def layers(self, count: int) -> range:
        """Return the layers of this rank's stage: the last ones are rank 0's, as in mlx-lm."""
        share, remainder = divmod(count, self.group.size())
        sizes = [share + (rank < remainder) for rank in range(self.group.size())]
        start = sum(sizes[self.group.rank() + 1 :])
        return range(start, start + sizes[self.group.rank()])


def shard(checkpoint: Checkpoint, model: Any, share: Share) -> None:
    """Leave of mlx-lm's model, not read yet, what this rank computes. Raises ModelLoadFailed."""
    inner = getattr(model, "model", None)
    can = {"tensor": hasattr(model, "shard"), "pipeline": hasattr(inner, "pipeline")}
    if not can[share.parallel]:
        other = next((name for name, is_able in can.items() if is_able), None)
        hint = f"use `parallel: {other}`" if other else "no model of its kind can be divided"
        raise checkpoint.failed(
            f"mlx-lm cannot divide a {_model_type(checkpoint)} by `parallel: {share.parallel}`; "
            f"{hint}"
        )
    _check_sizes(checkpoint, share)
    with checkpoint.blame():
        if inner is not None and share.parallel == "pipeline":
            inner.pipeline(share.group)
        else:
            model.shard(share.group)


def _check_sizes(checkpoint: Checkpoint, share: Share) -> None:
    config, ranks = _text_config(checkpoint.config()), share.group.size()
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
    """What the files say of a rank's share of a model, for its size before it is loaded."""

    def __init__(self, whole: Listing, share: Share) -> None:
        self._whole = whole
        self._share = share

    def failed(self, reason: str) -> ModelLoadFailed:
        return self._whole.failed(reason)

    def config(self) -> Mapping[str, Any]:
        """Return the config, with the KV heads or the layers of this rank alone."""
        config = dict(_text_config(self._whole.config()))
        ranks, heads = self._share.group.size(), config.get("num_attention_heads")
        quantization = self._whole.config().get("quantization")
        if quantization is not None:
            config["quantization"] = quantization
        if self._share.parallel == "pipeline":
            if isinstance(layers := config.get("num_hidden_layers"), int):
                config["num_hidden_layers"] = len(self._share.layers(layers))
        elif isinstance(heads, int) and heads:
            kv_heads = config.get("num_key_value_heads") or heads
            if not config.get("head_dim") and isinstance(config.get("hidden_size"), int):
                config["head_dim"] = config["hidden_size"] // heads
            config["num_key_value_heads"] = -(-kv_heads // ranks)
        return config

    def tensors(self) -> Mapping[str, Tensor]:
        """List the arrays that this rank holds, with the shape of its share."""
        shards = ((name, self._cut(name, tensor)) for name, tensor in self._whole.tensors().items())
        return {name: tensor for name, tensor in shards if tensor is not None}

    def _cut(self, name: str, tensor: Tensor) -> Tensor | None:
        """Return what this rank has of an array: all of what is in no layer."""
        _, layers, after = f".{name}".partition(".layers.")
        number = after.partition(".")[0]
        if not layers or not number.isdecimal():
            return tensor
        if self._share.parallel == "pipeline":
            return tensor if int(number) in self._stage else None
        if len(tensor.shape) < 2:
            return tensor  # a norm's, or a bias, which is small
        ranks = self._share.group.size()
        shape = (-(-tensor.shape[0] // ranks), *tensor.shape[1:])
        return replace(tensor, shape=shape, nbytes=-(-tensor.nbytes // ranks))

    @cached_property
    def _stage(self) -> range:
        return self._share.layers(int(_text_config(self._whole.config())["num_hidden_layers"]))


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text: Mapping[str, Any] = config.get("text_config") or config
    return text


def _model_type(checkpoint: Checkpoint) -> str:
    return str(checkpoint.config().get("model_type"))
