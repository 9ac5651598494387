"""
Spans of requests by OpenTelemetry, sent by OTLP over HTTP from a thread of its own. The only module that
imports opentelemetry; it is imported only where the settings have an endpoint.

A span of a stage has the length that was measured for the stage. Stages are placed one after the other, from
the request's beginning on, in the order in which a request passes them: what lies between two of them is not
shown.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvshare import __version__
from proxy.request_record import RequestRecord
from proxy.trace_context import TraceContext

log = logging.getLogger(__name__)

_PATH = "/v1/traces"
_TIMEOUT_S = 5.0
_CLOSE_S = 5.0  # for what is not sent when the server stops
_LIBRARY = ("opentelemetry.exporter", "opentelemetry.sdk")  # they log each failure, with tracebacks

_ORDER = (
    *("body", "tokenize", "wait", "prefix", "fingerprint", "embedding", "plan", "fetch"),
    *("ticket", "write", "recompute", "engine"),
)
"""Stages as a request passes them. `engine` and `recompute` end with the first token."""


class OtelTracer:
    """See `proxy.tracing.Tracer`."""

    def __init__(self, endpoint: str, *, sample_share: float) -> None:
        """`sample_share`: of the requests without a `traceparent`; others are sampled as that says."""
        for name in _LIBRARY:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        named = {"service.name": "kvshare", "service.version": __version__}
        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win.
        resource = Resource(named).merge(Resource.create())
        if "unknown_service" in str(resource.attributes.get("service.name")):
            resource = resource.merge(Resource(named))
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sample_share)), resource=resource, shutdown_on_exit=False
        )
        url = endpoint if endpoint.endswith(_PATH) else endpoint.rstrip("/") + _PATH
        exporter = _Reported(OTLPSpanExporter(endpoint=url, timeout=_TIMEOUT_S), url)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("kvshare", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, method: str, headers: Mapping[str, str]) -> OtelSpan:
        """See `Tracer.begin`."""
        given = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        parent = self._propagator.extract(given)
        span = self._tracer.start_span(method, context=parent, kind=trace.SpanKind.SERVER)
        return OtelSpan(self._tracer, span, method)

    def close(self) -> None:
        """See `Tracer.close`."""
        # The library waits half a minute for a collector that hangs. No exit waits for a daemon thread.
        closing = threading.Thread(target=self._provider.shutdown, name="kvshare-traces", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)
        if closing.is_alive():
            log.warning("the last traces were not sent within %g s, and are lost", _CLOSE_S)


class OtelSpan:
    """See `proxy.tracing.RequestSpan`."""

    def __init__(self, tracer: trace.Tracer, span: trace.Span, method: str) -> None:
        self._tracer, self._span, self._method = tracer, span, method
        self._began_ns = time.time_ns()

    @property
    def context(self) -> TraceContext:
        found = self._span.get_span_context()
        ids = trace.format_trace_id(found.trace_id), trace.format_span_id(found.span_id)
        return TraceContext(*ids, f"{int(found.trace_flags):02x}")

    def end(self, record: RequestRecord, endpoint: str, status: int) -> None:
        """See `RequestSpan.end`."""
        if self._span.is_recording():
            self._span.update_name(f"{self._method} {endpoint}")
            self._span.set_attributes(_attributes(record, self._method, endpoint, status))
            if status >= 500 or record.answer.ended_as == "error":
                failure = record.failure
                self._span.set_status(trace.StatusCode.ERROR, None if failure is None else failure.code)
            self._add_stages(record)
        self._span.end()

    def _add_stages(self, record: RequestRecord) -> None:
        context, began_ns = trace.set_span_in_context(self._span), self._began_ns
        for stage, seconds in _stages_of(record):
            ended_ns = began_ns + round(seconds * 1e9)
            self._tracer.start_span(stage, context=context, start_time=began_ns).end(ended_ns)
            began_ns = ended_ns


class _Reported(SpanExporter):
    """Says once when spans cannot be sent, and once when they can be again."""

    def __init__(self, exporter: SpanExporter, url: str) -> None:
        self._exporter, self._url, self._has_failed = exporter, url, False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        outcome = self._exporter.export(spans)
        has_failed = outcome is not SpanExportResult.SUCCESS
        if has_failed and not self._has_failed:
            log.warning("traces cannot be sent to %s, and are lost: check tracing.endpoint", self._url)
        elif self._has_failed and not has_failed:
            log.info("traces are sent again to %s", self._url)
        self._has_failed = has_failed
        return outcome

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)


def _stages_of(record: RequestRecord) -> Iterator[tuple[str, float]]:
    """
    The stages of a request in their order, with their seconds. The last is `first token`: from the end of the
    others until there was one.
    """
    seconds = dict(record.preparation.stages)
    for finished in record.answer.finished.values():
        seconds |= finished.stage_seconds  # of several prompts, which are computed side by side, the last
    total = 0.0
    for stage in _ORDER:
        if stage in seconds:
            total += seconds[stage]
            yield stage, seconds[stage]
    if record.answer.first_token_s is not None and record.answer.first_token_s > total:
        yield "first token", record.answer.first_token_s - total


def _attributes(record: RequestRecord, method: str, endpoint: str, status: int) -> dict[str, Any]:
    """No text and no tokens of a prompt are in them."""
    attributes: dict[str, Any] = {
        "http.request.method": method,
        "http.route": endpoint,
        "http.response.status_code": status,
        "kvshare.request.id": record.unique_id,
        "kvshare.tenant": record.admission.caller.tenant,
        "kvshare.key": record.admission.caller.name,
    }
    if record.answer.reports:
        total = record.answer.total
        attributes |= {
            "kvshare.decision": str(total.decision),
            "kvshare.tokens.exact": total.num_exact,
            "kvshare.tokens.copied": total.num_copied,
            "kvshare.tokens.repaired": total.num_repaired,
            "kvshare.tokens.computed": total.num_missed,
            "gen_ai.usage.input_tokens": total.num_prompt_tokens,
        }
    if record.reason is not None:
        attributes["kvshare.reason"] = str(record.reason)
    if record.answer.num_completion_tokens is not None:
        attributes["gen_ai.usage.output_tokens"] = record.answer.num_completion_tokens
    if record.failure is not None:
        attributes["error.type"] = record.failure.code
    return attributes
