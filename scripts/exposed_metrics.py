"""The metrics that a server can expose, with their labels, from registries that count each kind of event."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvshare.engine import Finished
from kvshare.part_problems import PartState
from kvshare.parts import ServedPart
from kvshare.reasons import Reason
from kvshare.requests import Decision, Prediction, SharingMode, SharingReport
from kvshare.sharing.control.blocks import Arm
from kvshare.status import (
    ControlStatus,
    EngineStatus,
    IndexStatus,
    LoadStatus,
    ReplicaStatus,
    ShadowStatus,
    TierStatus,
)
from kvshare.telemetry import Component, EvictionCause, FallbackReason, Telemetry, TicketEvent
from kvshare.vllm_protocol import stages
from proxy.auth import LOCAL
from proxy.metrics import Metrics
from proxy.request_record import (
    AdmissionRecord,
    AnswerRecord,
    BodyRecord,
    PreparationRecord,
    RequestFailure,
    RequestRecord,
)
from vector_index import CircuitState, IndexSchema, Nominator, QdrantRemoteIndex

FIXED: Mapping[tuple[str, str], Sequence[str]] = {
    ("kvshare_fallback_total", "component"): [*Component, "replica"],
    ("kvshare_fallback_total", "reason"): [*FallbackReason],
    ("kvshare_evictions_total", "reason"): [*EvictionCause],
    ("kvshare_circuit_state", "state"): [*CircuitState],
    ("kvshare_plans_executed_total", "planned"): [*Decision],
    ("kvshare_plans_executed_total", "executed"): [*Decision],
    ("kvshare_vllm_stage_seconds_total", "stage"): stages.ALL,
    ("kvshare_speculative_steps_total", "executed"): [*Decision],
    ("kvshare_speculative_tokens_total", "executed"): [*Decision],
    ("kvshare_control_requests_total", "arm"): [*Arm],
    ("kvshare_engine_events_total", "event"): [*TicketEvent, "tickets:pending", "unshared:REASON"],
}
"""By metric and label: all values, where an enum has them."""
_REPLICA = "replica-1"


@dataclass(frozen=True, slots=True)
class ExposedMetric:
    text: str
    labels: dict[str, set[str]] = field(default_factory=dict)  # values that were seen, by label


Exposed = Mapping[str, ExposedMetric]  # by the name that is scraped


def exposed_metrics() -> Exposed:
    """The metrics of an engine that generates, and of a fleet."""
    exposed: dict[str, ExposedMetric] = {}
    for status in _statuses(_circuits()):
        metrics = Metrics(
            status=partial(_same, status),
            num_inflight=lambda: 0,
            parts=lambda _: dict.fromkeys(ServedPart, PartState.OK),
        )
        for decision in Decision:
            metrics.count(_request(decision), endpoint="/v1/chat/completions", status=200)
        for family in metrics.registry.collect():
            name = f"{family.name}{'_total' if family.type == 'counter' else ''}"
            metric = exposed.setdefault(name, ExposedMetric(family.documentation))
            assert family.samples, f"{family.name} has no sample: let this script make one"
            for sample in family.samples:
                for label, value in sample.labels.items():
                    if label != "le":  # the edge of a histogram's bucket
                        seen = metric.labels.setdefault(label, set())
                        if value != _REPLICA:
                            seen.add(value)
    return exposed


def _same(status: EngineStatus) -> EngineStatus:
    return status


def _circuits() -> Mapping[str, CircuitState]:
    schema = IndexSchema(kgram=8, window=9, max_fingerprints=64, embedder="", dimension=0)
    nominator = Nominator(QdrantRemoteIndex(schema, ":memory:"))
    nominator.close()
    return {part: circuit.state for part, circuit in nominator.circuits.items()}


def _counted() -> Telemetry:
    """Each kind of count, once."""
    telemetry = Telemetry()
    for component in Component:
        telemetry.fallback(component, FallbackReason.ERROR)
    telemetry.replica_failed(_REPLICA)
    telemetry.evicted(EvictionCause.LOST)
    telemetry.evicted(EvictionCause.QUOTA, for_quota_of="acme")
    telemetry.executed(Decision.APPROX, Decision.FULL, Reason.SEGMENTS_GONE, {"write": 0.1})
    telemetry.answered(Decision.APPROX, num_steps=2, num_tokens=5)
    telemetry.unshared(Reason.MULTIMODAL)
    telemetry.ticket(TicketEvent.EXPIRED)
    return telemetry


def _statuses(circuits: Mapping[str, CircuitState]) -> Iterator[EngineStatus]:
    """Of an engine that generates, and of a fleet."""
    index = IndexStatus(
        paused=None, num_waiting=0, free_bytes=1, store_bytes=1, num_foreign_hits=0, circuits=circuits
    )
    counts = _counted().counts()
    load = LoadStatus("2-3", 1, "less", slower=0.1, num_blocks_more=9, num_blocks_less=9)
    control = ControlStatus(0.02, dict.fromkeys(Arm, 1), {"reduced": 1, "returned": 0}, (load,))
    tiers = tuple(TierStatus(name, 1, 1, 1, num_hits=1, num_misses=3) for name in ("memory", "disk"))
    yield EngineStatus(
        True,
        "",
        index=index,
        counts=counts,
        num_embedding=0,
        control=control,
        shadow=ShadowStatus(0.1, 2, 1, 0, measured=0.1, expected=0.1, largest=0.1),
        tiers=tiers,
        tenant_bytes=lambda: {"acme": 1},
    )
    replica = ReplicaStatus(_REPLICA, serves=True, shares=True, num_inflight=0, num_segments=0, kv_bytes=0)
    yield EngineStatus(
        True,
        "",
        index=index,
        counts=counts,
        replicas=(replica,),
        num_pending_tickets=0,
        tenant_bytes=lambda: {"a": 1},
    )


def _request(decision: Decision) -> RequestRecord:
    """One that adds to every metric of requests."""
    reason = Reason.DEVIATES_TOO_MUCH if decision is Decision.FULL else None
    report = SharingReport(
        num_exact=1,
        num_copied=1,
        num_recomputed=1,
        num_repaired=1,
        decision=decision,
        reason=reason,
        prediction=Prediction(0.1, 0.2, 0.0, 0.02, "windows", 1),
    )
    return RequestRecord(
        "id",
        "id",
        admission=AdmissionRecord(LOCAL, is_counted=True, failure=RequestFailure("queue_full", "full")),
        body=BodyRecord(rules=("clock",)),
        preparation=PreparationRecord(SharingMode.APPROX, tokenize_s=0.1),
        answer=AnswerRecord(
            reports={0: report},
            finished={0: Finished(report, 1, {"plan": 0.1})},
            first_token_s=0.1,
            token_gaps_s=[0.1],
        ),
    )
