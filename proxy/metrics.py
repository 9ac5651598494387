"""
The Prometheus metrics: what each request adds to, and what the engine is asked at scrape time.

One registry per server, which also has the process's own figures. Label values come from fixed sets: route
patterns, statuses, enums, the operator's names of rules, replicas and some tenants; never from a client.
Texts, labels and buckets are in metrics.yaml.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import yaml
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass

from kvshare import __version__
from kvshare.parts import PartState, ServedPart
from kvshare.reasons import Reason
from kvshare.requests import Decision, SharingMode, SharingReport
from kvshare.status import EngineStatus
from kvshare.telemetry import EvictionCause
from kvshare.vllm_protocol import stages
from proxy.request_record import RequestRecord
from vector_index import CircuitState


@dataclass(frozen=True)
class _Row:
    """A metric in metrics.yaml."""

    text: str
    labels: tuple[str, ...] = ()
    edges: tuple[float, ...] = ()


_TABLE = TypeAdapter(dict[str, dict[str, _Row]]).validate_python(
    yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
)
_MOST_TENANTS = 50
_OTHER = "other"
_TOO_MANY = 429
_Figures = Iterable[tuple[tuple[str, ...], float]]
"""Values of a metric's labels, and the figure for them."""


class Metrics(Collector):
    """The metrics of one server. Its registry asks it for the engine's own figures when Prometheus asks."""

    def __init__(
        self,
        *,
        status: Callable[[], EngineStatus | None],
        num_inflight: Callable[[], int],
        parts: Callable[[EngineStatus], Mapping[ServedPart, PartState]] = lambda status: {},
    ) -> None:
        """`status` gives None until the engine is up. `parts`: the state of each part."""
        self.registry = registry = CollectorRegistry()
        self._counters = {
            name: Counter(name, row.text, row.labels, registry=registry)
            for name, row in _TABLE["counters"].items()
        }
        self._histograms = {
            name: Histogram(name, row.text, row.labels, buckets=row.edges, registry=registry)
            for name, row in _TABLE["histograms"].items()
        }
        build = Gauge("kvshare_build_info", "The version that runs.", ("version",), registry=registry)
        build.labels(__version__).set(1)
        inflight = Gauge(
            "kvshare_inflight_requests", "Generating requests being answered.", registry=registry
        )
        inflight.set_function(num_inflight)
        self._status = status
        self._parts = parts
        self._tenants: set[str] = set()
        registry.register(self)
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)

    def name_tenants(self, tenants: Iterable[str]) -> None:
        """Metrics have these tenants by name: the first 50 since the start. All others are `other`."""
        for tenant in tenants:
            if len(self._tenants) < _MOST_TENANTS:
                self._tenants.add(tenant)

    def _named(self, tenant: str) -> str:
        return tenant if tenant in self._tenants else _OTHER

    def collect(self) -> Iterator[Metric]:
        """The engine's own figures; none until it is up."""
        if (status := self._status()) is None:
            return
        gauges, counters = _TABLE["engine gauges"], _TABLE["engine counters"]
        for name, figures in (*_state(status), *_counted(status)):
            family: GaugeMetricFamily | CounterMetricFamily
            if name in gauges:
                family = GaugeMetricFamily(name, gauges[name].text, labels=gauges[name].labels)
            else:
                family = CounterMetricFamily(name, counters[name].text, labels=counters[name].labels)
            for values, figure in figures:
                family.add_metric(values, float(figure))
            yield family
        yield self._bytes_of_tenants(status)
        yield self._states_of_parts(status)

    def _bytes_of_tenants(self, status: EngineStatus) -> Metric:
        name = "kvshare_tenant_kv_bytes"
        row, sums = _TABLE["engine gauges"][name], Counts[str]()
        for tenant, num_bytes in status.tenant_bytes().items():
            sums[self._named(tenant)] += num_bytes
        family = GaugeMetricFamily(name, row.text, labels=row.labels)
        for tenant, num_bytes in sums.items():
            family.add_metric((tenant,), float(num_bytes))
        return family

    def _states_of_parts(self, status: EngineStatus) -> Metric:
        name = "kvshare_part_state"
        row = _TABLE["engine gauges"][name]
        family = GaugeMetricFamily(name, row.text, labels=row.labels)
        for part, now in self._parts(status).items():
            for state in PartState:
                family.add_metric((part, state), float(state is now))
        return family

    def count(self, record: RequestRecord, *, endpoint: str, status: int) -> None:
        """Add a request that is over."""
        self._counters["kvshare_requests"].labels(endpoint, str(status), record.answer.ended_as).inc()
        stages = self._histograms["kvshare_stage_duration_seconds"]
        for stage, seconds in record.preparation.stages.items():
            stages.labels(stage).observe(seconds)
        for rule in record.body.rules:
            self._counters["kvshare_rules_applied"].labels(rule).inc()
        if record.admission.is_counted:
            self._count_tenant(record, status)
        if record.preparation.mode is None:
            return
        self._histograms["kvshare_request_duration_seconds"].labels(endpoint).observe(record.duration_s)
        if record.answer.first_token_s is not None:
            self._histograms["kvshare_time_to_first_token_seconds"].observe(record.answer.first_token_s)
        for gap in record.answer.token_gaps_s:
            self._histograms["kvshare_inter_token_latency_seconds"].observe(gap)
        for finished in record.answer.finished.values():
            for stage, seconds in finished.stage_seconds.items():
                if stage != "tokenize":  # measured here, around the engine's encode_*
                    stages.labels(stage).observe(seconds)
        for report in record.answer.reports.values():
            self._count_sources(report, record.preparation.mode)

    def _count_tenant(self, record: RequestRecord, status: int) -> None:
        tenant, total = self._named(record.admission.caller.tenant), record.answer.total
        outcome = "refused" if status == _TOO_MANY else "failed" if status >= 400 else "served"
        self._counters["kvshare_tenant_requests"].labels(tenant, outcome).inc()
        tokens = self._counters["kvshare_tenant_prompt_tokens"]
        tokens.labels(tenant, "compute").inc(total.num_missed)
        tokens.labels(tenant, "kvshare_exact").inc(total.num_exact)
        tokens.labels(tenant, "kvshare_approx").inc(total.num_copied)

    def _count_sources(self, report: SharingReport, mode: SharingMode) -> None:
        """Count the tokens of a prompt by where their KV came from."""
        tokens = self._counters["kvshare_prompt_tokens_by_source"]
        tokens.labels("compute").inc(report.num_missed)
        tokens.labels("kvshare_exact").inc(report.num_exact)
        tokens.labels("kvshare_approx").inc(report.num_copied)
        fraction = report.num_missed / max(1, report.num_prompt_tokens)
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


def _state(status: EngineStatus) -> Iterator[tuple[str, _Figures]]:
    """Yield gauges of the engine, its index and its replicas. Names of replicas are the operator's."""
    figures: dict[str, float | None] = {
        "kvshare_queue_depth": status.num_waiting,
        "kvshare_running_requests": status.num_running,
        "kvshare_tree_nodes": status.num_nodes,
        "kvshare_tree_segments": status.num_segments,
        "kvshare_tree_depth": status.max_depth,
        "kvshare_tree_bytes": status.kv_bytes,
        "kvshare_tree_budget_bytes": status.kv_budget_bytes,
        "kvshare_embedding_backlog": status.num_embedding,
    }
    yield from _tiers(status)
    if (index := status.index) is not None:
        figures |= {
            "kvshare_index_paused": index.paused is not None,
            "kvshare_index_waiting_prompts": index.num_waiting,
            "kvshare_index_disk_free_bytes": index.free_bytes,
            "kvshare_store_disk_bytes": index.store_bytes,
        }
    yield from ((name, [((), figure)]) for name, figure in figures.items() if figure is not None)
    if index is not None:
        circuits = index.circuits.items()
        states = [((part, state), state is now) for part, now in circuits for state in CircuitState]
        yield "kvshare_circuit_state", states
    if (control := status.control) is not None:
        loads = control.loads
        yield "kvshare_control_rung", [((each.load,), each.rung) for each in loads]
        slower = [((each.load,), each.slower) for each in loads if each.slower is not None]
        yield "kvshare_control_slowdown_ratio", slower
    if replicas := status.replicas:
        yield "kvshare_replica_up", [((each.name,), each.serves) for each in replicas]
        yield "kvshare_replica_sharing", [((each.name,), each.shares) for each in replicas]
        yield "kvshare_replica_inflight", [((each.name,), each.num_inflight) for each in replicas]
        yield "kvshare_replica_segments", [((each.name,), each.num_segments) for each in replicas]
        yield "kvshare_replica_kv_bytes", [((each.name,), each.kv_bytes) for each in replicas]


def _tiers(status: EngineStatus) -> Iterator[tuple[str, _Figures]]:
    """Yield gauges of the tiers of the engine in this process."""
    if tiers := status.tiers:
        yield "kvshare_tier_segments", [((tier.name,), tier.num_segments) for tier in tiers]
        yield "kvshare_tier_bytes", [((tier.name,), tier.num_bytes) for tier in tiers]
        yield "kvshare_tier_max_bytes", [((tier.name,), tier.max_bytes) for tier in tiers]
        yield "kvshare_tier_due_bytes", [((tier.name,), tier.num_due_bytes) for tier in tiers]
        yield "kvshare_tier_paused", [((tier.name,), tier.problem is not None) for tier in tiers]
        yield (
            "kvshare_tier_reads",
            [
                ((tier.name, result), count)
                for tier in tiers
                for result, count in (
                    ("hit", tier.num_hits),
                    ("miss", tier.num_misses - tier.num_late - tier.num_dropped),
                    ("late", tier.num_late),
                    ("dropped", tier.num_dropped),
                )
            ],
        )


def _counted(status: EngineStatus) -> Iterator[tuple[str, _Figures]]:
    """Yield counters of the engine. All causes of evictions are listed, also with 0."""
    counts, index = status.counts, status.index
    if not status.replicas:  # vLLM counts the tokens that it generates
        yield "kvshare_generated_tokens", [((), counts.num_generated_tokens)]
    denials = counts.num_isolation_denials + (0 if index is None else index.num_foreign_hits)
    yield "kvshare_isolation_denials", [((), denials)]
    failures = [(("replica", name), count) for name, count in counts.replica_failures.items()]
    yield "kvshare_fallback", [*counts.fallbacks.items(), *failures]
    yield "kvshare_evictions", [((cause,), counts.evictions[cause]) for cause in EvictionCause]
    if (control := status.control) is not None:
        yield "kvshare_control_requests", [((arm,), count) for arm, count in control.num_requests.items()]
        yield "kvshare_control_changes", [((way,), count) for way, count in control.changes.items()]
    executions = counts.executions.items()
    plans = [((planned, done, reason or ""), count) for (planned, done, reason), count in executions]
    yield "kvshare_plans_executed", plans
    if status.replicas:
        yield "kvshare_vllm_stage_seconds", [((stage,), counts.vllm_seconds[stage]) for stage in stages.ALL]
    for name, counted in (("steps", counts.answer_steps), ("tokens", counts.answer_tokens)):
        yield f"kvshare_speculative_{name}", [((done,), count) for done, count in counted.items()]
    events: list[tuple[tuple[str, ...], float]] = [
        *(((f"unshared:{reason}",), count) for reason, count in counts.unshared.items()),
        *(((str(event),), count) for event, count in counts.tickets.items()),
    ]
    if status.num_pending_tickets is not None:
        events.append((("tickets:pending",), status.num_pending_tickets))
    yield "kvshare_engine_events", events
