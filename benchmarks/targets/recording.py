"""The cost of telling where a request's time went: header, log fields, metrics."""

import time
from statistics import median

from benchmarks.targets.rig import MINILM, Rig, errors, rest
from benchmarks.targets.verdicts import Target, Verdict
from gateway import clock, metrics
from gateway.api.middleware import record_timings, server_timing, timings_log
from gateway.clock import Stage, Timings

RECORDING = Target("recording / one-text request (MiniLM) over HTTP, p50", at_most=0.01)
REQUESTS = 40
TIMES = 5_000  # a recording is some microseconds
TOKENS = 17  # tokens of a text of 15 words
STAGES = Stage.PARSE, Stage.TOKENIZE, Stage.QUEUE, Stage.LANE, Stage.INFERENCE, Stage.SERIALIZE


async def recording(rig: Rig) -> list[Verdict]:
    """Ask over HTTP, then record as many times as a loop makes exact, in this process.

    The line of the access log is written with or without the record: it is not counted.
    """
    samples, spent, wrong = [], [], 0
    workload = rig.embeddings(MINILM)
    requests = max(10, round(rig.seconds(REQUESTS)))
    async with rig.gateway() as peer:
        for _ in range(rig.rounds):
            answers = [await peer.ask(workload.next()) for _ in range(requests)]
            await rest()
            wrong += errors(answers)
            recorded_s = timed(TIMES)
            over_http_s = median([answer.seconds for answer in answers])
            samples.append(recorded_s / over_http_s)
            spent.append((recorded_s, over_http_s))
    recorded_s, over_http_s = (median(each) for each in zip(*spent, strict=True))
    note = f"{recorded_s * 1e6:.0f} of {over_http_s * 1e6:.0f} µs"
    return [RECORDING.judge(samples, errors=wrong, note=note)]


def timed(times: int) -> float:
    """Return the seconds of one recording, the mean of a number of them."""
    record_request()  # the first finds the series
    started = time.perf_counter()
    for _ in range(times):
        record_request()
    return (time.perf_counter() - started) / times


def record_request() -> None:
    """Time, tell and count, as an embeddings request of one text does on its way."""
    timings = Timings(model=MINILM, tokens_in=TOKENS)
    for stage in STAGES:
        began = clock.now()
        timings.add(stage, began)
    _count_batch()
    server_timing(timings)
    metrics.of(metrics.REQUESTS, "/v1/embeddings", "200").inc()
    metrics.of(metrics.REQUEST_SECONDS, "/v1/embeddings").observe(clock.now() - timings.started)
    record_timings(timings, "/v1/embeddings")
    timings_log(timings)


def _count_batch() -> None:
    """Count a request as queue, lane and batch do."""
    for depth in (1, 0):
        metrics.of(metrics.QUEUE_DEPTH, MINILM).set(depth)
    metrics.of(metrics.FAST_PATH, MINILM).inc()
    metrics.count_prompt(MINILM, TOKENS)
    metrics.of(metrics.EMBEDDING_OUTPUTS, MINILM, "dense").inc()
    metrics.of(metrics.BATCH_ROWS, MINILM).observe(1)
    metrics.of(metrics.BATCH_PADDING, MINILM).observe(0)
    metrics.of(metrics.LANE_WAIT, "embedding").observe(0)
    metrics.of(metrics.LANE_HOLD, "embedding").observe(0.01)
    metrics.of(metrics.LANE_SECONDS, "embedding").inc(0.01)
