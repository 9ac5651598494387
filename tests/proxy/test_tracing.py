"""A client's trace is passed on and named; spans go to a real collector's socket, by OTLP."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from kvshare.errors import MissingExtraError
from proxy.request_record import RequestRecord
from proxy.trace_context import TraceContext
from proxy.tracing import tracer_of
from tests.fake_vllm import running_vllm
from tests.proxy.conftest import Server, chat, running_server, settings_with
from tests.proxy.fake_engine import Behaviour
from tests.proxy.relay.bodies import body_of
from tests.proxy.relay.relay_server import running_relay

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GIVEN = f"00-{TRACE}-{SPAN}-01"
PATH = "/v1/chat/completions"


@dataclass
class Collector:
    """What takes spans by OTLP over HTTP; `url` is its address."""

    url: str = ""
    status: int = 200
    spans: list[Any] = field(default_factory=list)

    async def take(self, request: web.Request) -> web.Response:
        body = ExportTraceServiceRequest.FromString(await request.read())
        if self.status == 200:
            self.spans += [
                span
                for resource in body.resource_spans
                for scope in resource.scope_spans
                for span in scope.spans
            ]
        return web.Response(status=self.status)

    def named(self, name: str) -> Any:
        (found,) = (span for span in self.spans if span.name == name)
        return found


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    collector, app = Collector(), web.Application()
    app.router.add_post("/v1/traces", collector.take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    collector.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield collector
    finally:
        await runner.cleanup()


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


async def test_spans_of_a_request_reach_a_collector() -> None:
    """One for the request, below the client's, and one for each stage below that; no text is in them."""
    async with collecting() as collector:
        async with running_server(tracing__endpoint=collector.url) as server:
            answer = await server.post(PATH, chat("a secret word"), traceparent=GIVEN)
        root = collector.named(f"POST {PATH}")
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, SPAN)
    assert answer.headers["traceresponse"] == f"00-{TRACE}-{root.span_id.hex()}-01"
    found = attributes(root)
    assert found["http.response.status_code"] == 200
    assert (found["kvshare.decision"], found["kvshare.tenant"]) == ("full", "local")
    assert found["kvshare.request.id"] == answer.headers["X-KVShare-Request"]
    stages = [span for span in collector.spans if span is not root]
    assert {"tokenize", "plan", "recompute"} <= {span.name for span in stages}
    assert {span.parent_span_id for span in stages} == {root.span_id}
    ordered = sorted(stages, key=lambda span: span.start_time_unix_nano)
    ends = [root.start_time_unix_nano, *(span.end_time_unix_nano for span in ordered)]
    for span, end in zip(ordered, ends, strict=False):
        assert span.start_time_unix_nano >= end - 100_000_000  # both clocks are read one after the other
    assert not any(b"secret" in span.SerializeToString() for span in collector.spans)


async def test_errors_are_seen_in_spans() -> None:
    """A failure of the server marks its span; a client's own mistake does not."""
    async with collecting() as collector:  # noqa: SIM117  spans arrive when the server has stopped
        async with running_server(Behaviour(fail_after_tokens=0), tracing__endpoint=collector.url) as server:
            failed = await server.post(PATH, chat())
            refused = await server.post(PATH, {"model": "echo"})
    by_status = {
        attributes(span)["http.response.status_code"]: span for span in collector.spans if span.kind == 2
    }
    assert {failed.status, refused.status} == set(by_status)
    assert by_status[failed.status].status.code == 2
    assert by_status[400].status.code == 0
    assert attributes(by_status[400])["error.type"]


async def test_only_sampled_requests_are_sent() -> None:
    """A share of those without a trace; with one, what its flag says."""
    async with collecting() as collector:  # noqa: SIM117
        async with running_server(tracing__endpoint=collector.url, tracing__sample_share=0.0) as server:
            await server.post(PATH, chat())
            await server.post(PATH, chat(), traceparent=GIVEN[:-1] + "0")
            await server.post(PATH, chat(), traceparent=GIVEN)
            await server.get("/health", traceparent=GIVEN)
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    assert len([span for span in collector.spans if span.kind == 2]) == 1


async def test_a_collector_that_fails_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Requests are answered as ever."""
    async with collecting() as collector:
        collector.status = 400
        with caplog.at_level(logging.INFO):
            async with running_server(tracing__endpoint=collector.url) as server:
                for _ in range(3):
                    assert (await server.post(PATH, chat())).status == 200
    warnings = [each.message for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "tracing.endpoint" in warnings[0]


async def test_without_an_endpoint_the_clients_trace_is_named(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """In the answer and in the log, and an invalid one is as if there were none."""
    with caplog.at_level(logging.INFO, logger="proxy.middleware"):
        answer = await server.post(PATH, chat(), traceparent=GIVEN)
        other = await server.post(PATH, chat(), traceparent="00-0-0-00")
    assert answer.headers["traceresponse"] == GIVEN
    assert "traceresponse" not in other.headers
    first, second = (each for each in caplog.records if each.name == "proxy.middleware")
    assert first.fields["trace"] == TRACE  # type: ignore[attr-defined]  # what our formatter reads
    assert f"trace={TRACE}" in first.message
    assert "trace=" not in second.message


@pytest.mark.parametrize("is_on", [False, True])
async def test_vllm_gets_the_trace(is_on: bool, tmp_path: Path) -> None:
    """The client's span as it is, or ours, which is below it: vLLM's own spans are below that one."""
    async with collecting() as collector, running_vllm() as vllm:
        endpoint = collector.url if is_on else None
        async with running_relay(tmp_path, vllm, tracing__endpoint=endpoint) as relay:
            answer = await relay.send(PATH, body_of(PATH, "Rome"), traceparent=GIVEN, tracestate="a=b")
        span_id = collector.named(f"POST {PATH}").span_id.hex() if is_on else SPAN
    seen = [(name.lower(), value) for name, value in vllm.generated[-1].headers.items()]
    context = f"00-{TRACE}-{span_id}-01"
    assert [value for name, value in seen if name == "traceparent"] == [context]
    assert answer.headers["traceresponse"] == context
    assert ("tracestate", "a=b") in seen
    if is_on:
        assert {"body", "tokenize", "ticket", "first token"} <= {span.name for span in collector.spans}


@pytest.mark.parametrize(
    "header",
    [
        *("", "x", GIVEN[3:], GIVEN.upper(), f"ff{GIVEN[2:]}", f"{GIVEN}-more"),
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
    ],
)
def test_what_is_not_a_traceparent(header: str) -> None:
    """As the standard has it: ignored."""
    assert TraceContext.of({"traceparent": header}) is None


def test_later_versions_of_the_header_are_read() -> None:
    """Their first four parts are those of version 00, which is what is passed on."""
    found = TraceContext.of({"traceparent": f"01{GIVEN[2:]}-more"})
    assert found is not None
    assert found.header == GIVEN


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the command that installs it; without an endpoint nothing is needed."""
    monkeypatch.setattr("kvshare.extras.find_spec", lambda name: None)
    assert tracer_of(settings_with().tracing) is None
    with pytest.raises(MissingExtraError, match=r"kvshare\[otel\]"):
        tracer_of(settings_with(tracing__endpoint="http://127.0.0.1:4318").tracing)


def test_by_default_no_spans_are_made() -> None:
    """And with an endpoint those of all requests."""
    assert json.loads(settings_with().tracing.model_dump_json()) == {"endpoint": None, "sample_share": 1.0}


def test_a_collector_that_hangs_keeps_no_server_from_stopping(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It takes connections and never answers: what is not sent is lost, and the log says so."""
    monkeypatch.setattr("proxy.otel_spans._CLOSE_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        endpoint = f"http://127.0.0.1:{hanging.getsockname()[1]}"
        tracer = tracer_of(settings_with(tracing__endpoint=endpoint).tracing)
        assert tracer is not None
        tracer.begin("POST", {}).end(RequestRecord("r", "u"), "/v1/completions", 200)
        tracer.close()
        assert "the last traces were not sent within 0.1 s" in caplog.text
