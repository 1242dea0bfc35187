"""A router that gives each request to the next replica, to compare with. In Ray's process."""

from itertools import count
from typing import Any

from ray.serve.request_router import RequestRouter

from deploy.ray import board


class RoundRobin(RequestRouter):  # type: ignore[misc]  # it has no types
    """Takes turns."""

    def initialize_state(self, **_: Any) -> None:
        """Begin with the first."""
        self._turns = count()

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        """Return the replicas, from the next one on."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        first = next(self._turns) % len(candidate_replicas)
        in_order = sorted(candidate_replicas, key=lambda each: str(each.replica_id))
        return [[each] for each in (*in_order[first:], *in_order[:first])]

    def update_replicas(self, replicas: list[Any]) -> None:
        """Take the controller's list of replicas."""
        super().update_replicas(replicas)
        board.BOARD.update(len(self.curr_replicas))
