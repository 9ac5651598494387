"""What Prometheus sees: it parses, it adds up, and no client can make it grow."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from numpy.typing import NDArray
from prometheus_client.parser import text_string_to_metric_families

from kvshare.reasons import Reason
from kvshare.status import EngineStatus, IndexStatus
from kvshare.telemetry import Component, EvictionCause, FallbackReason, Telemetry
from proxy.metrics import Metrics
from tests.proxy.conftest import Server, chat, eventually, running_server
from tests.proxy.fake_engine import Behaviour
from vector_index import Hit, IndexSchema, Nominator, QdrantRemoteIndex

CHAT = "/v1/chat/completions"
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


async def scrape(server: Server) -> Samples:
    """Every sample by name and labels."""
    response = await server.get("/metrics")
    assert response.status == 200
    assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(await response.text())
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples.get((name, frozenset(labels.items())), 0.0)


def total(samples: Samples, name: str) -> float:
    return sum(amount for (sample, _), amount in samples.items() if sample == name)


async def test_tokens_add_up_to_what_usage_said(server: Server) -> None:
    """Sources sum to the prompt tokens, hits to the cached tokens, lookups to the requests that looked."""
    bodies = [chat(), chat(kvshare={"mode": "exact"}), chat("other"), chat(kvshare={"mode": "off"})]
    usages = [(await (await server.post(CHAT, body)).json())["usage"] for body in bodies]
    samples = await scrape(server)
    source = "kvshare_prompt_tokens_by_source_total"
    assert total(samples, source) == sum(usage["prompt_tokens"] for usage in usages)
    for name, key in (("kvshare_exact", "exact"), ("kvshare_approx", "copied")):
        assert value(samples, source, source=name) == sum(usage["kvshare"][key] for usage in usages)
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert value(samples, "kvshare_lookup_tokens_hit_total") == sum(cached)
    requested = sum(usage["prompt_tokens"] for usage in usages[:3])
    assert value(samples, "kvshare_lookup_tokens_requested_total") == requested
    lookups = "kvshare_lookup_requests_total"
    assert value(samples, lookups, result="miss", reason="no_candidates") == 1
    assert value(samples, lookups, result="exact", reason="") == 1
    assert value(samples, lookups, result="approx", reason="") == 1
    assert value(samples, lookups, result="skipped", reason="off") == 1
    assert value(samples, "kvshare_recompute_fraction_count") == 4


async def test_requests_are_counted_by_route_and_outcome(server: Server) -> None:
    """Status and finish reason are labels; duration and first token are observed once per answer."""
    await server.post(CHAT, chat())
    await server.post(CHAT, chat(stream=True, max_tokens=2))
    await server.post(CHAT, chat(n=0))
    await server.post("/v1/completions", {"model": "echo", "prompt": ["a", "b"]})
    samples = await scrape(server)
    requests = "kvshare_requests_total"
    assert value(samples, requests, endpoint=CHAT, status="200", finish_reason="stop") == 1
    assert value(samples, requests, endpoint=CHAT, status="200", finish_reason="length") == 1
    assert value(samples, requests, endpoint=CHAT, status="400", finish_reason="") == 1
    assert value(samples, "kvshare_request_duration_seconds_count", endpoint=CHAT) == 2
    assert value(samples, "kvshare_time_to_first_token_seconds_count") == 3
    assert value(samples, "kvshare_inter_token_latency_seconds_count") == 4 + 1
    assert value(samples, "kvshare_stage_duration_seconds_count", stage="plan") == 4
    assert value(samples, "kvshare_stage_duration_seconds_count", stage="tokenize") == 3
    assert value(samples, "kvshare_stage_duration_seconds_sum", stage="tokenize") < 60


async def test_failures_and_disconnects_have_their_own_labels() -> None:
    """A broken stream is 200 with finish_reason error; a client that left is 499."""
    async with running_server(Behaviour(fail_after_tokens=1)) as server:
        await server.post(CHAT, chat(stream=True))
        samples = await scrape(server)
    assert value(samples, "kvshare_requests_total", endpoint=CHAT, status="200", finish_reason="error") == 1
    async with running_server(Behaviour(prefill_s=30)) as server:
        task = asyncio.create_task(server.post(CHAT, chat()))
        await asyncio.wait_for(server.engine.running.wait(), 20)
        assert value(await scrape(server), "kvshare_inflight_requests") == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await eventually(lambda: server.lifecycle.num_running == 0)
        samples = await scrape(server)
    assert value(samples, "kvshare_requests_total", endpoint=CHAT, status="499", finish_reason="") == 1
    assert value(samples, "kvshare_inflight_requests") == 0


async def test_the_engine_is_asked_at_scrape_time(server: Server) -> None:
    """Tree gauges, evictions, denials and fallbacks are the engine's own figures."""
    await server.post(CHAT, chat())
    telemetry = server.engine.telemetry
    telemetry.evicted(EvictionCause.CAPACITY, 3)
    telemetry.isolation_denied()
    for _ in range(2):
        telemetry.fallback(Component.FINGERPRINT, FallbackReason.TIMEOUT)
    telemetry.replica_failed("b")
    telemetry.generated(7)
    telemetry.unshared(Reason.MULTIMODAL)
    samples = await scrape(server)
    assert value(samples, "kvshare_tree_nodes") == 1
    assert value(samples, "kvshare_tree_depth") == 1
    assert value(samples, "kvshare_tree_bytes") == 0
    assert value(samples, "kvshare_queue_depth") == 0
    assert value(samples, "kvshare_evictions_total", reason="capacity") == 3
    assert value(samples, "kvshare_isolation_denials_total") == 1
    assert value(samples, "kvshare_fallback_total", component="fingerprint", reason="timeout") == 2
    assert value(samples, "kvshare_fallback_total", component="replica", reason="b") == 1
    assert value(samples, "kvshare_engine_events_total", event="unshared:multimodal") == 1
    assert value(samples, "kvshare_generated_tokens_total") == 7
    assert total(samples, "kvshare_build_info") == 1


class _LeakingIndex(QdrantRemoteIndex):
    """One whose filter by namespace fails."""

    async def search_fingerprints(
        self, namespace: str, fingerprints: NDArray[np.uint32], limit: int
    ) -> list[Hit]:
        return self.own_hits(namespace, [("another", Hit(prompt_id=1, score=9.0))])


async def test_foreign_hits_of_the_index_reach_the_alarm() -> None:
    """Each is one denial, like a candidate that reached the planner."""
    schema = IndexSchema(kgram=8, window=9, max_fingerprints=64, embedder="", dimension=0)
    index = _LeakingIndex(schema, ":memory:")
    await index.open()
    telemetry = Telemetry()
    telemetry.isolation_denied()

    def status() -> EngineStatus:
        seen = IndexStatus(None, 0, None, num_foreign_hits=index.foreign_hits)
        return EngineStatus(True, "", counts=telemetry.counts(), index=seen)

    metrics = Metrics(status=status, num_inflight=lambda: 0)
    assert metrics.registry.get_sample_value("kvshare_isolation_denials_total") == 1
    nominator = Nominator(index)
    nomination = await nominator.nominate("ours", np.arange(64, dtype=np.int32), None, allow_dense=False)
    nominator.close()
    assert nomination.candidates == ()
    assert index.foreign_hits > 0
    denials = metrics.registry.get_sample_value("kvshare_isolation_denials_total")
    assert denials == 1 + index.foreign_hits
    await index.close()


async def test_the_process_is_measured_by_the_servers_own_registry(server: Server) -> None:
    samples = await scrape(server)
    assert value(samples, "process_resident_memory_bytes") > 2**20
    assert value(samples, "process_open_fds") > 3
    assert total(samples, "python_info") == 1


async def test_clients_cannot_add_series(server: Server) -> None:
    """Paths, methods, models and ids that a client makes up add no label values."""
    await server.get("/first/unknown/path")
    await server.get("/v1/models/first")
    before = len(await scrape(server))
    for number in range(10):
        await server.get(f"/unknown/{number}")
        await server.get(f"/v1/models/m{number}")
        await server.get("/another", **{"X-Request-Id": f"id{number}"})
    assert len(await scrape(server)) <= before + 2  # /metrics itself appears after the first scrape


@pytest.mark.parametrize("num_servers", [2])
async def test_servers_do_not_mix_their_figures(num_servers: int) -> None:
    """Each server has a registry of its own."""
    async with running_server() as one, running_server() as other:
        await one.post(CHAT, chat())
        assert total(await scrape(other), "kvshare_prompt_tokens_by_source_total") == 0


async def test_refusals_are_counted_by_their_code(server: Server) -> None:
    """The code where there is one, else the type; and the model has its name."""
    for body in (chat(echo=True), chat(temperature=9), chat(temperature=9)):
        assert (await server.post(CHAT, body)).status == 400
    await server.post("/nowhere", {})
    samples = await scrape(server)
    assert value(samples, "kvshare_refusals_total", code="unsupported_parameter") == 1
    assert value(samples, "kvshare_refusals_total", code="invalid_request_error") == 2
    assert value(samples, "kvshare_refusals_total", code="not_found") == 1
    assert value(samples, "kvshare_model_info", model="echo") == 1
