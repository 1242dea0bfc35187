"""The answers of all replicas, as one answer."""

from typing import Any

import orjson
from prometheus_client.parser import text_string_to_metric_families

from deploy.ray.merging import Answer, merge

METRICS = b"""# HELP gateway_rows Answers in the batch.
# TYPE gateway_rows gauge
gateway_rows{model="m"} 2.0
# HELP gateway_requests_total Requests answered.
# TYPE gateway_requests_total counter
gateway_requests_total{route="a \\"b\\""} 5.0
"""


def answer(name: str, body: Any, status: int = 200) -> Answer:
    raw = body if isinstance(body, bytes) else orjson.dumps(body)
    return Answer(name, status, [(b"content-type", b"application/json")], raw)


def model(name: str, state: str, used: float | None = None) -> dict[str, Any]:
    return {"id": name, "state": state, "last_used": used, "bytes": 7 if used else None}


def test_metrics_have_each_family_once_and_every_replicas_series() -> None:
    whole = merge("/metrics", [answer("a", METRICS), answer("b", METRICS)])
    text = whole.body.decode()
    assert text.count("# TYPE gateway_rows gauge") == 1
    series = {
        tuple(sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name in ("gateway_rows", "gateway_requests_total")
    }
    assert series == {
        (("model", "m"), ("replica", "a")): 2,
        (("model", "m"), ("replica", "b")): 2,
        (("replica", "a"), ("route", 'a "b"')): 5,
        (("replica", "b"), ("route", 'a "b"')): 5,
    }


def test_a_models_state_is_that_of_the_replica_nearest_to_loaded() -> None:
    one = {"object": "list", "data": [model("m", "failed"), model("n", "loaded", 3)]}
    other = {"object": "list", "data": [model("m", "loading"), model("n", "unloaded", 5)]}
    merged = merge("/models", [answer("a", one), answer("b", other)]).json
    assert merged["data"] == [model("m", "loading"), {**model("n", "loaded", 5)}]
    shown = merge("/models/m", [answer("a", one["data"][0]), answer("b", other["data"][0])])
    assert shown.json == model("m", "loading")


def test_one_that_is_ready_is_enough() -> None:
    ready = {"status": "ready", "models": {"m": "loaded"}}
    merged = merge("/ready", [answer("a", {"status": "loading"}, 503), answer("b", ready)])
    assert (merged.status, merged.json) == (200, ready)
    assert merge("/health", [answer("a", {"status": "stuck"}, 503)]).status == 503


def test_readiness_without_models_has_none() -> None:
    """No replica names models to callers who may not list them."""
    bodies = [answer(name, {"status": "ready"}) for name in "ab"]
    assert merge("/ready", bodies).json == {"status": "ready"}


def test_a_command_to_all_replicas_has_the_worst_answer() -> None:
    done, refused = answer("a", {}, 200), answer("b", {"error": {}}, 400)
    assert merge("/admin/reload", [done, refused]) == refused
    assert merge("/admin/models/m/unload", [done, answer("b", {}, 202)]).status == 202
