"""Where a request's time went, told: Server-Timing, the access log, a chunk's field, metrics."""

from gateway import metrics
from gateway.jobs import Timings


def milliseconds(timings: Timings) -> dict[str, float]:
    """Give each stage's milliseconds so far, in the order they came, and the total."""
    told = {str(stage): round(1000 * s, 2) for stage, s in timings.seconds.items()}
    told["total"] = round(1000 * (metrics.now() - timings.started), 2)
    return told


def server_timing(timings: Timings) -> str:
    """Write the header (https://www.w3.org/TR/server-timing/); a stream's ends at its opening."""
    return ", ".join(f"{stage};dur={ms:g}" for stage, ms in milliseconds(timings).items())


def field(timings: Timings) -> dict[str, float]:
    """Give what a stream's usage chunk says of its stages."""
    return {f"{stage}_ms": ms for stage, ms in milliseconds(timings).items()}


def logged(timings: Timings) -> dict[str, str | int | float]:
    """Give what the access log says beside the total; nothing where no model was asked."""
    if timings.model is None:
        return {}
    stages = {f"{stage}_ms": round(1000 * s, 2) for stage, s in timings.seconds.items()}
    tokens = {"tokens_in": timings.tokens_in, "tokens_out": timings.tokens_out}
    preempted = {"preemptions": timings.preemptions} if timings.preemptions else {}
    return {"model": timings.model, **stages, **tokens, **preempted}


def left(timings: Timings) -> None:
    """Count a client who left before its answer was made, once, by what was being done for it: for
    the first of its jobs, where it had several under way.
    """
    stages = (each.stage for each in (timings, *timings.beside) if each.stage is not None)
    if timings.model is not None and (stage := next(stages, None)) is not None:
        metrics.of(metrics.CANCELLED, timings.model, stage).inc()


def record(timings: Timings) -> None:
    """Count the stages of a request that reached a model."""
    if timings.model is not None:
        for stage, seconds in timings.seconds.items():
            metrics.of(metrics.STAGE_SECONDS, timings.model, stage).observe(seconds)
