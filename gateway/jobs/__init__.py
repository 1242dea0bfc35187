"""What floors pass to one another: jobs on the way down, vectors and deltas on the way up.

Who asks is here; the rest by subject:

embed   texts → vectors
rerank  documents → scores
chat    conversations → deltas
steps   one choice of a chat job, what an engine does in a step, and what comes of it
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

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


@dataclass(frozen=True, slots=True)
class RoutingKeys:
    """A router's keys of the beginnings of a conversation, the shortest first: each beginning is
    longer by the same length. Only the prefix cache reads them.
    """

    keys: Sequence[bytes] = ()
    share: float = 0.0  # the longest beginning's, of the conversation

    def ends(self, tokens: int) -> Sequence[tuple[int, bytes]]:
        """Return about where each beginning ends, in a prompt of so many tokens."""
        step = self.share * tokens / max(1, len(self.keys))
        return [(round(step * i), key) for i, key in enumerate(self.keys, 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Where a job comes from, and its deadline."""

    request_id: str
    deadline: float  # a reading of the monotonic clock
    allowed_s: float  # from the request's beginning to the deadline
    tier: Tier = Tier.DEFAULT
    key_id: str | None = None
    cache_salt: str = ""  # what is kept of its texts is for callers with the same (vLLM's name)
    timings: Timings = field(default_factory=Timings)
    number: int = field(default_factory=itertools.count(1).__next__)  # an id may not be unique
    routing_keys: RoutingKeys = RoutingKeys()
