"""The request router: Ray's replicas and their statistics → candidates, and back.

It is run by the ingress's process, on its event loop. `ray.serve.request_router` is alpha.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from deploy.ray import board
from deploy.ray.calls import DIGEST_BYTES
from deploy.ray.choice import Call, Candidate, Reason, choose

LAG_S = 0.5  # a report may be as old as that when it comes: it may not know of what was sent since
LOADS_IN_S = 2.0  # by then a replica that was sent a model's first request says that it loads it
UNROUTED_S = 5.0  # a request that was not sent by then never will be: its client has left


@dataclass
class _Known:
    """One replica: its last report, and what was sent to it since, by Ray's id of the request."""

    stats: Mapping[str, Any] = field(default_factory=dict)
    came: float = 0.0
    kept: Mapping[str, frozenset[bytes]] = field(default_factory=dict)
    sent: dict[str, tuple[float, int, bool]] = field(default_factory=dict)  # when, tokens, is there
    loading: dict[str, float] = field(default_factory=dict)  # until when that is assumed

    def read(self, stats: Mapping[str, Any]) -> None:
        """Take a report, if it is a new one."""
        if stats is self.stats or not stats:
            return
        self.stats, self.came = stats, time.monotonic()
        self.kept = {model: frozenset(_cut(names)) for model, names in stats["prefixes"].items()}

    def candidate(self, name: str) -> Candidate:
        now = time.monotonic()
        late = {
            each
            for each, (at, _, is_there) in self.sent.items()
            if not is_there and now > at + UNROUTED_S
        }
        for each in late:
            del self.sent[each]
        own = sum(tokens for at, tokens, _ in self.sent.values() if at > self.came - LAG_S)
        loading = {model for model, until in self.loading.items() if now < until}
        models = frozenset(self.stats.get("models", ())) | loading
        return Candidate(name, models, self.stats.get("tokens", 0) + own, self.kept)


def _cut(names: bytes) -> Iterator[bytes]:
    return (names[at : at + DIGEST_BYTES] for at in range(0, len(names), DIGEST_BYTES))


class GatewayRouter(RequestRouter):  # type: ignore[misc]  # it has no types
    """Gives each call to the replica that `choice.choose` names, and to the next if it is full."""

    def initialize_state(self, **_: Any) -> None:
        """Begin with nothing known. Ray calls it once."""
        self._known: dict[ReplicaID, _Known] = {}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the replicas, best first, each as a rank of its own."""
        call = Call()
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # when all of them are full
            if pending_request.args and isinstance(pending_request.args[0], Call):
                call = pending_request.args[0]
        replicas = {_name(each): each for each in candidate_replicas}
        candidates = []
        for name, replica in replicas.items():
            known = self._known.setdefault(replica.replica_id, _Known())
            known.read(replica.routing_stats)
            candidates.append(known.candidate(name))
        choice = choose(call, candidates)
        board.CHOICES.labels(choice.reason).inc()
        if pending_request is not None:
            first = self._known[replicas[choice.names[0]].replica_id]
            request = pending_request.metadata.internal_request_id
            first.sent[request] = (time.monotonic(), call.tokens, False)
            if call.model is not None and choice.reason in (Reason.LOAD, Reason.SPREAD):
                first.loading[call.model] = time.monotonic() + LOADS_IN_S
        return [[replicas[name]] for name in choice.names]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Count a request where it was taken, which may be the second choice."""
        request = pending_request.metadata.internal_request_id
        for known in self._known.values():
            known.sent.pop(request, None)
        call = pending_request.args[0] if pending_request.args else None
        tokens = call.tokens if isinstance(call, Call) else 0
        known = self._known.setdefault(replica_id, _Known())
        known.sent[request] = (time.monotonic(), tokens, True)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Count it no longer."""
        if (known := self._known.get(replica_id)) is not None:
            known.sent.pop(internal_request_id, None)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a replica before the controller says that it is gone."""
        super().on_replica_actor_died(replica_id)
        self._forget()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take the controller's list of replicas."""
        super().update_replicas(replicas)
        self._forget()

    def _forget(self) -> None:
        self._known = {
            each: known for each, known in self._known.items() if each in self.curr_replicas
        }
        board.BOARD.update(len(self.curr_replicas))


def _name(replica: RunningReplica) -> str:
    """Return the name that the replica's ids have; until it is known, Ray's."""
    return str(replica.replica_metadata.get("name", replica.replica_id.unique_id))
