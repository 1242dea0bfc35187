"""Traces of requests, sent by OTLP/HTTP: a span for each request and each of its stages.

This module needs the extra `otel`. Spans contain no prompt, answer, tool or stop string.
"""

import logging
import time
from collections.abc import Collection, Mapping
from typing import Any

from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import (
    SERVICE_NAME,
    SERVICE_VERSION,
    OTELResourceDetector,
    Resource,
)
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import (
    Span,
    SpanKind,
    Status,
    StatusCode,
    format_span_id,
    format_trace_id,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import Scope

from gateway import __version__, clock, logs
from gateway.clock import Timings
from gateway.errors import shorten
from gateway.wire.validation import Request as WireRequest

log = logs.get("traces")

# The attribute names are from the HTTP conventions 1.41.1
# (https://github.com/open-telemetry/semantic-conventions/blob/v1.41.1/docs/http/http-spans.md) and
# from docs/gen-ai/gen-ai-spans.md at commit 002c8a6 of
# https://github.com/open-telemetry/semantic-conventions-genai.
PROVIDER = "mlx_gateway"  # a custom value, since the conventions have none for MLX
CLIENT_DISCONNECTED = "client_disconnected"
QUIET_S = 60.0
METHODS = frozenset(
    {"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "QUERY", "TRACE"}
)
_NS = 1_000_000_000


class Tracer:
    """Starts a trace for each request; the SDK reads its settings from OTEL_* variables.

    `operations` maps routes to GenAI's operation names.
    """

    def __init__(self, operations: Mapping[str, str], untraced: Collection[str]) -> None:
        self._operations = operations
        self._untraced = untraced
        resource = Resource.create({SERVICE_NAME: "mlx-gateway", SERVICE_VERSION: __version__})
        self._provider = TracerProvider(
            resource=resource.merge(OTELResourceDetector().detect()), shutdown_on_exit=False
        )
        self._tracer = self._provider.get_tracer("gateway", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._log_handler = _LogHandler()

    def open(self) -> None:
        logger = logging.getLogger("opentelemetry")
        logger.addHandler(self._log_handler)
        logger.propagate = False
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))

    def close(self) -> None:
        """Send the remaining spans, and wait until the collector answers."""
        try:
            self._provider.shutdown()
        finally:
            logging.getLogger("opentelemetry").removeHandler(self._log_handler)

    def begin(
        self, scope: Scope, headers: Mapping[bytes, bytes], request_id: str, timings: Timings
    ) -> "Trace | None":
        """Start a request's trace, as a part of the client's trace if `traceparent` names one."""
        if scope["path"] in self._untraced:
            return None
        carrier = {
            name: headers[name.encode()].decode("latin-1")
            for name in ("traceparent", "tracestate")
            if name.encode() in headers
        }
        started_ns = time.time_ns() - round((clock.now() - timings.started) * _NS)
        method = name = scope["method"]
        if method not in METHODS:
            method, name = "_OTHER", "HTTP"
        span = self._tracer.start_span(
            name,
            self._propagator.extract(carrier) if carrier else Context(),
            SpanKind.SERVER,
            _http_attributes(scope, method, headers, request_id),
            start_time=started_ns,
        )
        return Trace(self._tracer, span, name, timings, started_ns, self._operations)


def _http_attributes(
    scope: Scope, method: str, headers: Mapping[bytes, bytes], request_id: str
) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "http.request.method": method,
        "url.path": shorten(scope["path"]),
        "url.scheme": scope["scheme"],
        "network.protocol.version": scope["http_version"],
        "http.response.header.x-request-id": [request_id],
    }
    if scope.get("server") is not None:
        attributes["server.address"], port = scope["server"]
        if port is not None:
            attributes["server.port"] = port
    if b"user-agent" in headers:
        attributes["user_agent.original"] = shorten(headers[b"user-agent"].decode("latin-1"))
    return attributes


class Trace:
    """One request's span, from its headers to the end of its answer."""

    __slots__ = ("_name", "_operations", "_span", "_started_ns", "_timings", "_tracer")

    def __init__(
        self,
        tracer: otel.Tracer,
        span: Span,
        name: str,
        timings: Timings,
        started_ns: int,
        operations: Mapping[str, str],
    ) -> None:
        self._tracer = tracer
        self._span = span
        self._name = name
        self._timings = timings
        self._started_ns = started_ns
        self._operations = operations

    @property
    def trace_id(self) -> str:
        return format_trace_id(self._span.get_span_context().trace_id)

    @property
    def header(self) -> tuple[bytes, bytes]:
        # `traceresponse` has the format of `traceparent`, and is a draft:
        # https://w3c.github.io/trace-context/#traceresponse-header.
        context = self._span.get_span_context()
        span_id = format_span_id(context.span_id)
        value = f"00-{self.trace_id}-{span_id}-{context.trace_flags:02x}"
        return b"traceresponse", value.encode()

    def note_request(self, request: WireRequest) -> None:
        """Set attributes for the request's parameters, but not for its content."""
        if self._span.is_recording():
            for name, value in request.traced_fields().items():
                known = shorten(value) if isinstance(value, str) else value
                self._span.set_attribute(f"gen_ai.request.{name}", known)

    def end(
        self,
        route: str | None,
        status: int | None,
        error: str | None,
        seconds: float,
        *,
        has_left: bool,
    ) -> None:
        """End the span and add its children; `error` is the code of the error."""
        span, timings = self._span, self._timings
        if not span.is_recording():
            return
        if has_left and status is not None and status >= 400:
            status = None  # nobody received this status
        error = CLIENT_DISCONNECTED if has_left else error
        if error is None and (status or 500) >= 400:
            error = str(status or 500)
        ended_ns = self._started_ns + round(seconds * _NS)
        if route is not None:
            span.update_name(f"{self._name} {route}")
            span.set_attribute("http.route", route)
        if status is not None:
            span.set_attribute("http.response.status_code", int(status))
        if error is not None:
            span.set_attribute("error.type", error)
            # A 4xx is the client's error; an error after a 200 is the gateway's.
            if not has_left and not 400 <= (status or 500) < 500:
                span.set_status(Status(StatusCode.ERROR))
        operation = self._operations.get(route or "")
        if operation is not None:
            span.set_attributes(_gen_ai_attributes(operation, timings))
        self._add_stages(ended_ns, error)
        span.end(ended_ns)

    def _add_stages(self, ended_ns: int, error: str | None) -> None:
        timings, context = self._timings, set_span_in_context(self._span, Context())
        last, last_ns = None, self._started_ns
        for last, started, ended in timings.intervals:
            last_ns = self._wall_ns(ended)
            self._tracer.start_span(last, context, start_time=self._wall_ns(started)).end(last_ns)
        if error is not None and timings.stage is not None and timings.stage != last:
            # The stage in which the request ended has no interval yet.
            child = self._tracer.start_span(timings.stage, context, start_time=last_ns)
            child.set_attribute("error.type", error)
            child.end(ended_ns)

    def _wall_ns(self, reading: float) -> int:
        """Convert a reading of the monotonic clock to wall-clock nanoseconds."""
        return self._started_ns + round((reading - self._timings.started) * _NS)


def _gen_ai_attributes(operation: str, timings: Timings) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
    }
    if timings.model is None:
        return attributes
    jobs = (timings, *timings.parallel)
    attributes["gen_ai.response.model"] = timings.model
    attributes["gen_ai.usage.input_tokens"] = sum(job.tokens_in for job in jobs)
    # These are empty for embeddings and for a request that ended early.
    values = {
        "gen_ai.usage.output_tokens": sum(job.tokens_out for job in jobs),
        "gen_ai.response.finish_reasons": [reason for job in jobs for reason in job.finish_reasons],
        "gen_ai.usage.cache_read.input_tokens": sum(job.cached_tokens for job in jobs),
    }
    return attributes | {name: value for name, value in values.items() if value}


class _LogHandler(logging.Handler):
    """Writes the SDK's warnings to the log, each at most once in QUIET_S seconds."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._written: dict[tuple[str, int], float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        place = (record.pathname, record.lineno)
        if clock.now() - self._written.get(place, float("-inf")) >= QUIET_S:
            self._written[place] = clock.now()
            log.warning("traces_failing", detail=shorten(record.getMessage()))
