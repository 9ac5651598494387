"""
Spans of each request and its stages, sent by OpenTelemetry to the endpoint of the settings.

Without an endpoint nothing of OpenTelemetry is imported: the client's trace is passed on to vLLM, and named
in the log and in the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from kvshare.extras import require
from kvshare.settings import TracingSettings
from proxy.request_record import RequestRecord
from proxy.trace_context import TraceContext


class RequestSpan(Protocol):
    """The span of one request."""

    @property
    def context(self) -> TraceContext: ...

    def end(self, record: RequestRecord, endpoint: str, status: int) -> None:
        """The request is over: a span for it, and one for each of its stages."""


class Tracer(Protocol):
    """Makes spans. All methods except `close` run on the event loop and never block or raise."""

    def begin(self, method: str, headers: Mapping[str, str]) -> RequestSpan:
        """A request has come. Its span belongs to the client's, if its headers name one."""

    def close(self) -> None:
        """Send what was not sent yet. Blocks, for a few seconds at most."""


def tracer_of(settings: TracingSettings) -> Tracer | None:
    """
    Make what sends spans to the endpoint of the settings; None without an endpoint.

    Raises:  MissingExtraError if OpenTelemetry is not installed
    """
    if settings.endpoint is None:
        return None
    require("otel", what="tracing.endpoint")
    from proxy.otel_spans import OtelTracer

    return OtelTracer(settings.endpoint, sample_share=settings.sample_share)
