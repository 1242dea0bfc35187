"""An OpenTelemetry collector for tests: it takes spans by OTLP/HTTP and gives them back."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

KINDS = {1: "INTERNAL", 2: "SERVER"}


@dataclass(frozen=True)
class TakenSpan:
    """A span as it was sent."""

    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    started: int
    ended: int
    is_error: bool
    attributes: dict[str, Any]
    resource: dict[str, Any]


@dataclass
class Taken:
    """The spans that a collector has been sent so far."""

    endpoint: str = ""
    spans: list[TakenSpan] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    may_answer: threading.Event = field(default_factory=threading.Event)

    def servers(self) -> list[TakenSpan]:
        return [span for span in self.spans if span.kind == "SERVER"]

    def server(self) -> TakenSpan:
        """Return the one request's span."""
        [span] = self.servers()
        return span

    def children(self, parent: TakenSpan) -> list[TakenSpan]:
        """List a span's children in the order of their beginning."""
        found = [span for span in self.spans if span.parent_id == parent.span_id]
        return sorted(found, key=lambda span: (span.started, span.ended))

    def take(self, body: bytes) -> None:
        self.bodies.append(body)
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = _values(group.resource.attributes)
            for span in (span for scope in group.scope_spans for span in scope.spans):
                self.spans.append(
                    TakenSpan(
                        span.name,
                        KINDS[span.kind],
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        span.start_time_unix_nano,
                        span.end_time_unix_nano,
                        span.status.code == 2,
                        _values(span.attributes),
                        resource,
                    )
                )


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)


@contextmanager
def collecting() -> Iterator[Taken]:
    """Run a collector; without `may_answer` it takes spans and keeps the sender waiting."""
    taken = Taken()
    taken.may_answer.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            taken.headers.append({"path": self.path, **dict(self.headers.items())})
            taken.take(body)
            taken.may_answer.wait(30)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        taken.endpoint = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield taken
        finally:
            taken.may_answer.set()
            server.shutdown()
            thread.join()
