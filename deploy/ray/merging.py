"""One answer of all replicas' answers: /health, /ready, /models, /metrics and what admins ask."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import orjson
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import REGISTRY, Collector

LABEL: Final = "replica"
OWN: Final = "gateway_ray_"  # of the ingress's metrics, those that no replica has
# A model is as its replica that has most of it.
_STATES: Final = ("failed", "unloaded", "loading", "loaded")


@dataclass(frozen=True, slots=True)
class Answer:
    """What one replica answered."""

    name: str
    status: int
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)


def merge(path: str, answers: Sequence[Answer]) -> Answer:
    """Return one answer to a request to a path, without /v1, of at least one replica's.

    Where replicas differ, the worst status is told of what was to be done at each, and the best of
    what any of them can do.
    """
    is_done_by_each = path.startswith("/admin/")
    by_status = sorted(answers, key=lambda each: each.status)
    first = by_status[-1 if is_done_by_each else 0]
    good = [each for each in answers if each.status == first.status]
    if first.status >= 400 or is_done_by_each:
        return first
    if path == "/metrics":
        return replace(first, body=merge_metrics(good))
    if path == "/ready":
        return replace(first, body=orjson.dumps(_merge_ready([each.json for each in good])))
    if path == "/models":
        lists = [each.json for each in good]
        by_name = [{model["id"]: model for model in each["data"]} for each in lists]
        data = [
            _merge_model([each[name] for each in by_name if name in each]) for name in by_name[0]
        ]
        return replace(first, body=orjson.dumps({**lists[0], "data": data}))
    if path.startswith("/models/"):
        return replace(first, body=orjson.dumps(_merge_model([each.json for each in good])))
    return first


def _merge_ready(bodies: Sequence[dict[str, Any]]) -> dict[str, Any]:
    whole = dict(bodies[0])
    if "models" in whole:
        names = dict.fromkeys(name for each in bodies for name in each["models"])
        whole["models"] = {
            name: _best(each["models"].get(name, "unloaded") for each in bodies) for name in names
        }
    return whole


def _merge_model(models: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the model of the replica where it is loaded, or nearest to it."""
    best = max(models, key=lambda each: _STATES.index(each["state"]))
    used = [each["last_used"] for each in models if each["last_used"] is not None]
    return {**best, "last_used": max(used, default=None)}


def _best(states: Iterable[str]) -> str:
    return max(states, key=_STATES.index)


class _Labelled(Collector):
    def __init__(self, answers: Sequence[Answer]) -> None:
        self._answers = answers

    def collect(self) -> Iterator[Metric]:
        """Yield each family once, with every replica's samples and its label."""
        families: dict[str, Metric] = {}
        for answer in self._answers:
            for family in text_string_to_metric_families(answer.body.decode()):
                samples, family.samples = family.samples, []
                whole = families.setdefault(family.name, family)
                whole.samples += [
                    each._replace(labels={**each.labels, LABEL: answer.name}) for each in samples
                ]
        yield from families.values()


class _Own(Collector):
    def collect(self) -> Iterator[Metric]:
        """Yield the ingress's own families, of the choices it made."""
        return (each for each in REGISTRY.collect() if each.name.startswith(OWN))


def merge_metrics(answers: Sequence[Answer]) -> bytes:
    """Return all replicas' metrics, labelled by replica, and the ingress's own."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Labelled(answers))
    registry.register(_Own())
    return generate_latest(registry)
