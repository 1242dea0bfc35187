"""The objects that layers pass to one another: jobs go down, vectors and deltas come up.

embed   texts → vectors
rerank  documents → scores
chat    conversations → deltas
images  the images of a conversation
steps   one choice of a chat job; the plan of an engine's step, and its result
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from gateway.clock import Timings

Vectors: TypeAlias = npt.NDArray[np.float32]
TokenIds: TypeAlias = Sequence[int]


class Tier(StrEnum):
    """How urgent a job is to its caller (OpenAI's `service_tier`)."""

    PRIORITY = "priority"
    DEFAULT = "default"
    FLEX = "flex"


class Progress(NamedTuple):
    """The bytes of a model that are on the disk or in memory so far."""

    event: Literal["model_download", "model_loading"]
    model: str
    completed: int
    total: int | None  # None if unknown


@dataclass(frozen=True, slots=True)
class RoutingKeys:
    """A router's keys for beginnings of a conversation, the shortest first.

    The lengths of the beginnings are multiples of the shortest length.
    """

    keys: Sequence[bytes] = ()
    share: float = 0.0  # the part of the conversation that the longest beginning covers

    def ends(self, tokens: int) -> Sequence[tuple[int, bytes]]:
        """Estimate the token at which each beginning ends, and return it with the key."""
        step = self.share * tokens / max(1, len(self.keys))
        return [(round(step * i), key) for i, key in enumerate(self.keys, 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Where a job comes from, and its deadline."""

    request_id: str
    deadline: float  # a reading of the monotonic clock
    allowed_s: float  # seconds from the request's start to the deadline
    tier: Tier = Tier.DEFAULT
    key_id: str | None = None
    cache_salt: str = ""  # only callers with the same salt share cached texts (vLLM's name)
    timings: Timings = field(default_factory=Timings)
    number: int = field(default_factory=itertools.count(1).__next__)  # unique, unlike request_id
    routing_keys: RoutingKeys = RoutingKeys()
