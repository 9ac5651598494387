"""
The Prometheus metrics: what each request adds to, and what the engine is asked at scrape time.

One registry per server, which also has the process's own figures. Label values come from fixed sets: route
patterns, statuses, enums, the operator's names of rules and replicas; never from what a client sends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvshare import __version__
from kvshare.engines.base import EngineStatus, ReplicaStatus
from kvshare.reasons import Reason
from kvshare.requests import Decision, SharingMode, SharingReport
from kvshare.telemetry import EvictionCause
from proxy.request_log import RequestRecord
from vector_index import CircuitState


def _edges(text: str) -> tuple[float, ...]:
    return tuple(float(edge) for edge in text.split())


# vLLM's bucket edges where it has the same histogram, so that panels of both overlay.
_REQUEST_S = _edges("0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480")
_FIRST_TOKEN_S = _edges("0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40")
_TOKEN_GAP_S = _edges("0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10")
_STAGE_S = _edges("0.0001 0.0005 0.001 0.0025 0.005 0.01 0.025 0.05 0.1 0.25 0.5 1 2.5 5 10")
_DEVIATION = _edges("0.0001 0.0003 0.001 0.002 0.003 0.005 0.01 0.02 0.03 0.05 0.1 0.3 1")
_FRACTION = _edges("0.05 0.1 0.2 0.3 0.4 0.5 0.6 0.7 0.8 0.9 1")


# Counted per request: what it counts, and its labels.
_COUNTERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "kvshare_requests": (
        "Requests answered; status 499: the client went away.",
        ("endpoint", "status", "finish_reason"),
    ),
    "kvshare_prompt_tokens_by_source": ("Prompt tokens by where their KV came from.", ("source",)),
    "kvshare_lookup_requests": (
        "Prompts by what sharing found for them, and why not more.",
        ("result", "reason"),
    ),
    "kvshare_lookup_tokens_requested": ("Prompt tokens that were looked up.", ()),
    "kvshare_lookup_tokens_hit": ("Prompt tokens that were found and reused.", ()),
    "kvshare_rules_applied": ("Requests that a rule rewrote.", ("rule",)),
}

# Measured per request: what it measures, its labels, and the edges of its buckets.
_HISTOGRAMS: Mapping[str, tuple[str, tuple[str, ...], tuple[float, ...]]] = {
    "kvshare_request_duration_seconds": (
        "From the request's headers to the last byte, generating routes.",
        ("endpoint",),
        _REQUEST_S,
    ),
    "kvshare_time_to_first_token_seconds": (
        "From the request's headers to its first token.",
        (),
        _FIRST_TOKEN_S,
    ),
    "kvshare_inter_token_latency_seconds": ("Between tokens of one choice.", (), _TOKEN_GAP_S),
    "kvshare_stage_duration_seconds": ("Time per stage of a request.", ("stage",), _STAGE_S),
    "kvshare_recompute_fraction": ("Share of a prompt that was computed.", (), _FRACTION),
    "kvshare_expected_deviation_nats": (
        "Expected KL of an answer behind approximate KV, used or refused.",
        ("result", "repair"),
        _DEVIATION,
    ),
}


class Metrics:
    """The metrics of one server."""

    def __init__(self, *, status: Callable[[], EngineStatus | None], num_inflight: Callable[[], int]) -> None:
        """`status` gives None until the engine is up."""
        self.registry = registry = CollectorRegistry()
        self._counters = {
            name: Counter(name, text, labels, registry=registry) for name, (text, labels) in _COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(name, text, labels, buckets=edges, registry=registry)
            for name, (text, labels, edges) in _HISTOGRAMS.items()
        }
        build = Gauge("kvshare_build_info", "The version that runs.", ("version",), registry=registry)
        build.labels(__version__).set(1)
        inflight = Gauge(
            "kvshare_inflight_requests", "Generating requests being answered.", registry=registry
        )
        inflight.set_function(num_inflight)
        registry.register(_EngineCollector(status))
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)

    def count(self, record: RequestRecord, *, endpoint: str, status: int) -> None:
        """Add a request that is over."""
        self._counters["kvshare_requests"].labels(endpoint, str(status), record.finish_reason).inc()
        stages = self._histograms["kvshare_stage_duration_seconds"]
        if record.tokenize_s is not None:
            stages.labels("tokenize").observe(record.tokenize_s)
        for rule in record.rules:
            self._counters["kvshare_rules_applied"].labels(rule).inc()
        if record.mode is None:
            return
        self._histograms["kvshare_request_duration_seconds"].labels(endpoint).observe(record.duration_s)
        if record.first_token_s is not None:
            self._histograms["kvshare_time_to_first_token_seconds"].observe(record.first_token_s)
        for gap in record.token_gaps_s:
            self._histograms["kvshare_inter_token_latency_seconds"].observe(gap)
        for finished in record.finished.values():
            for stage, seconds in finished.stage_seconds.items():
                if stage != "tokenize":  # measured here, around the engine's encode_*
                    stages.labels(stage).observe(seconds)
        for report in record.reports.values():
            self._count_sources(report, record.mode)

    def _count_sources(self, report: SharingReport, mode: SharingMode) -> None:
        """Where the KV of a prompt came from."""
        num_computed = report.num_recomputed + report.num_repaired
        tokens = self._counters["kvshare_prompt_tokens_by_source"]
        tokens.labels("compute").inc(num_computed)
        tokens.labels("kvshare_exact").inc(report.num_exact)
        tokens.labels("kvshare_approx").inc(report.num_copied)
        fraction = num_computed / max(1, report.num_prompt_tokens)
        self._histograms["kvshare_recompute_fraction"].observe(fraction)
        lookups = self._counters["kvshare_lookup_requests"]
        if mode is SharingMode.OFF:
            lookups.labels("skipped", Reason.OFF).inc()
            return
        result = "miss" if report.decision == Decision.FULL else report.decision
        lookups.labels(result, report.reason or "").inc()
        if (prediction := report.prediction) is not None:
            taken = "used" if report.decision == Decision.APPROX else "refused"
            deviations = self._histograms["kvshare_expected_deviation_nats"]
            deviations.labels(taken, prediction.rule).observe(prediction.expected)
        self._counters["kvshare_lookup_tokens_requested"].inc(report.num_prompt_tokens)
        self._counters["kvshare_lookup_tokens_hit"].inc(report.num_cached)


class _EngineCollector(Collector):
    """The engine's own figures, read when Prometheus asks."""

    def __init__(self, status: Callable[[], EngineStatus | None]) -> None:
        self._status = status

    def collect(self) -> Iterable[Metric]:
        status = self._status()
        if status is None:
            return
        gauges: dict[str, tuple[str, float | None]] = {
            "kvshare_queue_depth": ("Requests that wait for a slot.", status.num_waiting),
            "kvshare_running_requests": ("Requests whose KV is on the device.", status.num_running),
            "kvshare_tree_nodes": ("Prompts in the tree.", status.num_nodes),
            "kvshare_tree_segments": ("KV segments in memory.", status.num_segments),
            "kvshare_tree_depth": ("Longest chain of edits.", status.max_depth),
            "kvshare_tree_bytes": ("Bytes of KV in memory.", status.kv_bytes),
            "kvshare_tree_budget_bytes": ("Bytes of KV that may be in memory.", status.kv_budget_bytes),
            "kvshare_embedding_backlog": ("Stored prompts that wait to be embedded.", status.num_embedding),
        }
        if (index := status.index) is not None:
            gauges |= {
                "kvshare_index_paused": ("1 while the index is not written.", index.paused is not None),
                "kvshare_index_waiting_prompts": ("Prompts that a paused index misses.", index.num_waiting),
                "kvshare_index_disk_free_bytes": ("Free bytes on the index's disk.", index.free_bytes),
                "kvshare_store_disk_bytes": ("Bytes on disk of metadata and index.", index.store_bytes),
            }
        for name, (text, value) in gauges.items():
            if value is not None:
                yield GaugeMetricFamily(name, text, value=float(value))
        if index is not None:
            yield _circuits(index.circuits)
        if status.replicas:
            yield from _replica_gauges(status.replicas)
        else:  # vLLM counts the tokens that it generates
            tokens = status.counts.num_generated_tokens
            yield CounterMetricFamily("kvshare_generated_tokens", "Tokens of answers.", value=tokens)
        denials = status.counts.num_isolation_denials + (0 if index is None else index.num_foreign_hits)
        yield CounterMetricFamily(
            "kvshare_isolation_denials",
            "Candidates of another namespace, dropped; alert on any.",
            value=denials,
        )
        yield from _counted(status)


_REPLICA_GAUGES: tuple[tuple[str, str, Callable[[ReplicaStatus], float]], ...] = (
    ("kvshare_replica_up", "Whether the replica takes requests.", lambda one: one.serves),
    ("kvshare_replica_sharing", "Whether its connector is connected and shares.", lambda one: one.shares),
    ("kvshare_replica_inflight", "Requests being answered by the replica.", lambda one: one.num_inflight),
    ("kvshare_replica_segments", "KV segments that the replica holds.", lambda one: one.num_segments),
    ("kvshare_replica_kv_bytes", "Bytes of those segments.", lambda one: one.kv_bytes),
)


def _replica_gauges(replicas: Sequence[ReplicaStatus]) -> Iterable[Metric]:
    """Of each vLLM behind the proxy; names are the operator's."""
    for name, text, figure in _REPLICA_GAUGES:
        gauge = GaugeMetricFamily(name, text, labels=("replica",))
        for replica in replicas:
            gauge.add_metric((replica.name,), float(figure(replica)))
        yield gauge


def _circuits(states: Mapping[str, CircuitState]) -> Metric:
    gauge = GaugeMetricFamily(
        "kvshare_circuit_state", "1 for the state of each circuit breaker.", labels=("component", "state")
    )
    for component, current in states.items():
        for state in CircuitState:
            gauge.add_metric((component, state), float(state is current))
    return gauge


def _counted(status: EngineStatus) -> Iterable[Metric]:
    """What the engine counts by fixed words. All causes of evictions are there, also with 0."""
    counts = status.counts
    yield _counter(
        "kvshare_fallback",
        "Requests served without a part that failed.",
        ("component", "reason"),
        [
            *counts.fallbacks.items(),
            *((("replica", name), count) for name, count in counts.replica_failures.items()),
        ],
    )
    evictions = [((cause,), counts.evictions[cause]) for cause in EvictionCause]
    yield _counter("kvshare_evictions", "Prompts evicted from the tree.", ("reason",), evictions)
    yield _counter(
        "kvshare_plans_executed",
        "Planned requests by what vLLM made of them.",
        ("planned", "executed", "reason"),
        [((planned, done, why or ""), count) for (planned, done, why), count in counts.executions.items()],
    )
    events = [((f"unshared:{reason}",), count) for reason, count in counts.unshared.items()]
    events += [((str(event),), count) for event, count in counts.tickets.items()]
    if status.num_pending_tickets is not None:
        events.append((("tickets:pending",), status.num_pending_tickets))
    yield _counter("kvshare_engine_events", "What else the engine counts.", ("event",), events)


def _counter(
    name: str, text: str, labels: Sequence[str], counts: Iterable[tuple[tuple[str, ...], int]]
) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=labels)
    for values, count in counts:
        family.add_metric(values, count)
    return family
