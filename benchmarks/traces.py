"""The cost of a request's trace to the event loop: `python -m benchmarks.traces`.

Nobody takes the spans, so that this is the gateway's part alone.
"""

import os
from statistics import median

from gateway.api.traces import Tracer
from gateway.clock import Stage, Timings, now

ROUTE = "/v1/chat/completions"
REQUESTS = 500
STAGES = [stage for stage in Stage if stage not in (Stage.INFERENCE, Stage.COMPILE)]


def trace(tracer: Tracer, traceparent: bytes) -> tuple[float, float]:
    """Return the seconds that a trace takes before its answer, and after it."""
    scope = {
        "path": ROUTE,
        "method": "POST",
        "scheme": "http",
        "http_version": "1.1",
        "server": ("127.0.0.1", 8000),
    }
    headers = {b"traceparent": traceparent, b"user-agent": b"benchmark"}
    timings = Timings(model="writer", tokens_in=100, tokens_out=100, finish_reasons=["stop"])
    began = now()
    trace = tracer.begin(scope, headers, "req-1", timings)
    assert trace is not None
    assert trace.header
    before_s = now() - began
    for stage in STAGES:
        timings.add(stage, began)
    ended = now()
    trace.end(ROUTE, 200, None, ended - timings.started, has_left=False)
    return before_s, now() - ended


def main() -> None:
    os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = "http://127.0.0.1:9"
    tracer = Tracer({ROUTE: "chat"}, frozenset())
    tracer.open()
    for name, flags in (("sampled", b"01"), ("not sampled", b"00")):
        traceparent = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-" + flags
        costs = [trace(tracer, traceparent) for _ in range(REQUESTS)]
        before, after = (1e6 * median(each) for each in zip(*costs, strict=True))
        print(f"{name}: {before:.0f} µs before the answer, {after:.0f} µs after it")


if __name__ == "__main__":
    main()
