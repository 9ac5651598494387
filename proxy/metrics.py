"""
The Prometheus metrics: what each request adds to, and what the engine is asked at scrape time.

One registry per server, which also has the process's own figures. Label values come from fixed sets: route
patterns, statuses, enums, the operator's names of rules, replicas and some tenants; never from a client.
Names, texts, labels and buckets are in metric_names.py.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator, Mapping

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

from kvshare import __version__
from kvshare.part_problems import PartState
from kvshare.parts import ServedPart
from kvshare.reasons import Reason
from kvshare.requests import Decision, SharingMode, SharingReport
from kvshare.status import EngineStatus
from kvshare.telemetry import EvictionCause
from kvshare.vllm_protocol import stages
from proxy.metric_names import EngineCounter, EngineGauge, RequestCounter, RequestHistogram
from proxy.request_record import RequestRecord
from vector_index import CircuitState

_MOST_TENANTS = 50
_OTHER = "other"
_TOO_MANY = 429
_Figures = Iterable[tuple[tuple[str, ...], float]]
"""Values of a metric's labels, and the figure for them."""
_EngineMetric = EngineGauge | EngineCounter


class Metrics(Collector):
    """The metrics of one server. Its registry asks it for the engine's own figures when Prometheus asks."""

    def __init__(
        self,
        *,
        status: Callable[[], EngineStatus | None],
        num_inflight: Callable[[], int],
        parts: Callable[[EngineStatus], Mapping[ServedPart, PartState]] = lambda status: {},
        model: Callable[[], str] = lambda: "",
    ) -> None:
        """`status` gives None until the engine is up. `parts`: the state of each part. `model`: its name."""
        self.registry = registry = CollectorRegistry()
        self._counters = {
            row: Counter(row.metric, row.text, row.labels, registry=registry) for row in RequestCounter
        }
        self._histograms = {
            row: Histogram(row.metric, row.text, row.labels, buckets=row.edges, registry=registry)
            for row in RequestHistogram
        }
        build = Gauge("kvshare_build_info", "The version that runs.", ("version",), registry=registry)
        build.labels(__version__).set(1)
        inflight = Gauge(
            "kvshare_inflight_requests", "Generating requests being answered.", registry=registry
        )
        inflight.set_function(num_inflight)
        self._status = status
        self._parts, self._model = parts, model
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
        for row, figures in (*_state(status), *_counted(status)):
            family = _family(row)
            for values, figure in figures:
                family.add_metric(values, float(figure))
            yield family
        served = _family(EngineGauge.MODEL_INFO)
        served.add_metric((self._model(),), 1.0)
        yield served
        yield self._of_tenants(EngineGauge.TENANT_KV_BYTES, status.tenant_bytes())
        yield self._of_tenants(EngineCounter.TENANT_EVICTIONS, status.counts.tenant_evictions)
        yield self._states_of_parts(status)

    def _of_tenants(self, row: EngineGauge | EngineCounter, figures: Mapping[str, int]) -> Metric:
        sums = Counts[str]()
        for tenant, figure in figures.items():
            sums[self._named(tenant)] += figure
        family = _family(row)
        for tenant, total in sums.items():
            family.add_metric((tenant,), float(total))
        return family

    def _states_of_parts(self, status: EngineStatus) -> Metric:
        family = _family(EngineGauge.PART_STATE)
        for part, now in self._parts(status).items():
            for state in PartState:
                family.add_metric((part, state), float(state is now))
        return family

    def count(self, record: RequestRecord, *, endpoint: str, status: int) -> None:
        """Add a request that is over."""
        self._counters[RequestCounter.REQUESTS].labels(endpoint, str(status), record.answer.ended_as).inc()
        if (failure := record.admission.failure) is not None:
            self._counters[RequestCounter.REFUSALS].labels(failure.code).inc()
        stages = self._histograms[RequestHistogram.STAGE_DURATION_SECONDS]
        for stage, seconds in record.preparation.stages.items():
            stages.labels(stage).observe(seconds)
        for rule in record.body.rules:
            self._counters[RequestCounter.RULES_APPLIED].labels(rule).inc()
        if record.admission.is_counted:
            self._count_tenant(record, status)
        if record.preparation.mode is None:
            return
        self._histograms[RequestHistogram.REQUEST_DURATION_SECONDS].labels(endpoint).observe(
            record.duration_s
        )
        if record.answer.first_token_s is not None:
            self._histograms[RequestHistogram.TIME_TO_FIRST_TOKEN_SECONDS].observe(
                record.answer.first_token_s
            )
        for gap in record.answer.token_gaps_s:
            self._histograms[RequestHistogram.INTER_TOKEN_LATENCY_SECONDS].observe(gap)
        for finished in record.answer.finished.values():
            for stage, seconds in finished.stage_seconds.items():
                if stage != "tokenize":  # measured here, around the engine's encode_*
                    stages.labels(stage).observe(seconds)
        for report in record.answer.reports.values():
            self._count_sources(report, record.preparation.mode)

    def _count_tenant(self, record: RequestRecord, status: int) -> None:
        tenant, total = self._named(record.admission.caller.tenant), record.answer.total
        outcome = "refused" if status == _TOO_MANY else "failed" if status >= 400 else "served"
        self._counters[RequestCounter.TENANT_REQUESTS].labels(tenant, outcome).inc()
        tokens = self._counters[RequestCounter.TENANT_PROMPT_TOKENS]
        tokens.labels(tenant, "compute").inc(total.num_missed)
        tokens.labels(tenant, "kvshare_exact").inc(total.num_exact)
        tokens.labels(tenant, "kvshare_approx").inc(total.num_copied)

    def _count_sources(self, report: SharingReport, mode: SharingMode) -> None:
        """Count the tokens of a prompt by where their KV came from."""
        tokens = self._counters[RequestCounter.PROMPT_TOKENS_BY_SOURCE]
        tokens.labels("compute").inc(report.num_missed)
        tokens.labels("kvshare_exact").inc(report.num_exact)
        tokens.labels("kvshare_approx").inc(report.num_copied)
        fraction = report.num_missed / max(1, report.num_prompt_tokens)
        self._histograms[RequestHistogram.RECOMPUTE_FRACTION].observe(fraction)
        lookups = self._counters[RequestCounter.LOOKUP_REQUESTS]
        if mode is SharingMode.OFF:
            lookups.labels("skipped", Reason.OFF).inc()
            return
        result = "miss" if report.decision == Decision.FULL else report.decision
        lookups.labels(result, report.reason or "").inc()
        if (prediction := report.prediction) is not None:
            taken = "used" if report.decision == Decision.APPROX else "refused"
            deviations = self._histograms[RequestHistogram.EXPECTED_DEVIATION_NATS]
            deviations.labels(taken, prediction.rule).observe(prediction.expected)
        self._counters[RequestCounter.LOOKUP_TOKENS_REQUESTED].inc(report.num_prompt_tokens)
        self._counters[RequestCounter.LOOKUP_TOKENS_HIT].inc(report.num_cached)


def _family(row: _EngineMetric) -> GaugeMetricFamily | CounterMetricFamily:
    kind = GaugeMetricFamily if isinstance(row, EngineGauge) else CounterMetricFamily
    return kind(row.metric, row.text, labels=row.labels)


def _state(status: EngineStatus) -> Iterator[tuple[_EngineMetric, _Figures]]:
    """Yield gauges of the engine, its index and its replicas. Names of replicas are the operator's."""
    figures: dict[EngineGauge, float | None] = {
        EngineGauge.QUEUE_DEPTH: status.num_waiting,
        EngineGauge.RUNNING_REQUESTS: status.num_running,
        EngineGauge.TREE_NODES: status.num_nodes,
        EngineGauge.TREE_SEGMENTS: status.num_segments,
        EngineGauge.TREE_DEPTH: status.max_depth,
        EngineGauge.TREE_BYTES: status.kv_bytes,
        EngineGauge.TREE_BUDGET_BYTES: status.kv_budget_bytes,
        EngineGauge.EMBEDDING_BACKLOG: status.num_embedding,
    }
    yield from _tiers(status)
    if (index := status.index) is not None:
        figures |= {
            EngineGauge.INDEX_PAUSED: index.paused is not None,
            EngineGauge.INDEX_WAITING_PROMPTS: index.num_waiting,
            EngineGauge.INDEX_DISK_FREE_BYTES: index.free_bytes,
            EngineGauge.STORE_DISK_BYTES: index.store_bytes,
        }
    yield from ((row, [((), figure)]) for row, figure in figures.items() if figure is not None)
    if index is not None:
        circuits = index.circuits.items()
        states = [((part, state), state is now) for part, now in circuits for state in CircuitState]
        yield EngineGauge.CIRCUIT_STATE, states
    if (control := status.control) is not None:
        loads = control.loads
        yield EngineGauge.CONTROL_RUNG, [((each.load,), each.rung) for each in loads]
        slower = [((each.load,), each.slower) for each in loads if each.slower is not None]
        yield EngineGauge.CONTROL_SLOWDOWN_RATIO, slower
    if replicas := status.replicas:
        yield EngineGauge.REPLICA_UP, [((each.name,), each.serves) for each in replicas]
        yield EngineGauge.REPLICA_SHARING, [((each.name,), each.shares) for each in replicas]
        yield EngineGauge.REPLICA_INFLIGHT, [((each.name,), each.num_inflight) for each in replicas]
        yield EngineGauge.REPLICA_SEGMENTS, [((each.name,), each.num_segments) for each in replicas]
        yield EngineGauge.REPLICA_KV_BYTES, [((each.name,), each.kv_bytes) for each in replicas]


def _tiers(status: EngineStatus) -> Iterator[tuple[_EngineMetric, _Figures]]:
    """Yield gauges of the tiers of the engine in this process."""
    if tiers := status.tiers:
        yield EngineGauge.TIER_SEGMENTS, [((tier.name,), tier.num_segments) for tier in tiers]
        yield EngineGauge.TIER_BYTES, [((tier.name,), tier.num_bytes) for tier in tiers]
        yield EngineGauge.TIER_MAX_BYTES, [((tier.name,), tier.max_bytes) for tier in tiers]
        yield EngineGauge.TIER_DUE_BYTES, [((tier.name,), tier.num_due_bytes) for tier in tiers]
        yield EngineGauge.TIER_PAUSED, [((tier.name,), tier.problem is not None) for tier in tiers]
        yield (
            EngineCounter.TIER_READS,
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


def _counted(status: EngineStatus) -> Iterator[tuple[_EngineMetric, _Figures]]:
    """Yield counters of the engine. All causes of evictions are listed, also with 0."""
    counts, index = status.counts, status.index
    if not status.replicas:  # vLLM counts the tokens that it generates
        yield EngineCounter.GENERATED_TOKENS, [((), counts.num_generated_tokens)]
    denials = counts.num_isolation_denials + (0 if index is None else index.num_foreign_hits)
    yield EngineCounter.ISOLATION_DENIALS, [((), denials)]
    failures = [(("replica", name), count) for name, count in counts.replica_failures.items()]
    yield EngineCounter.FALLBACK, [*counts.fallbacks.items(), *failures]
    yield EngineCounter.EVICTIONS, [((cause,), counts.evictions[cause]) for cause in EvictionCause]
    if (control := status.control) is not None:
        yield EngineCounter.CONTROL_REQUESTS, [((arm,), count) for arm, count in control.num_requests.items()]
        yield EngineCounter.CONTROL_CHANGES, [((way,), count) for way, count in control.changes.items()]
    if (shadow := status.shadow) is not None:
        results = {"within": shadow.num_compared - shadow.num_above, "above": shadow.num_above}
        yield EngineCounter.SHADOW_ANSWERS, [((result,), count) for result, count in results.items()]
        sums = {"measured": shadow.measured, "expected": shadow.expected}
        yield EngineCounter.SHADOW_DEVIATION_NATS, [((kind,), nats) for kind, nats in sums.items()]
    executions = counts.executions.items()
    plans = [((planned, done, reason or ""), count) for (planned, done, reason), count in executions]
    yield EngineCounter.PLANS_EXECUTED, plans
    if status.replicas:
        yield (
            EngineCounter.VLLM_STAGE_SECONDS,
            [((stage,), counts.vllm_seconds[stage]) for stage in stages.ALL],
        )
    for row, counted in (
        (EngineCounter.SPECULATIVE_STEPS, counts.answer_steps),
        (EngineCounter.SPECULATIVE_TOKENS, counts.answer_tokens),
    ):
        yield row, [((done,), count) for done, count in counted.items()]
    events: list[tuple[tuple[str, ...], float]] = [
        *(((f"unshared:{reason}",), count) for reason, count in counts.unshared.items()),
        *(((str(event),), count) for event, count in counts.tickets.items()),
    ]
    if status.num_pending_tickets is not None:
        events.append((("tickets:pending",), status.num_pending_tickets))
    yield EngineCounter.ENGINE_EVENTS, events
