"""docs/reference.md has every metric, error code and reason of the code, and no other."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from kvshare.engine import Finished
from kvshare.errors import ErrorCode
from kvshare.part_problems import PartState
from kvshare.parts import ServedPart
from kvshare.reasons import Reason, explanations
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

_ROOT = Path(__file__).parents[2]
_TEXT = (_ROOT / "docs" / "reference.md").read_text("utf-8")
_CODE = re.compile(r"`([^`]+)`")


def rows(heading: str) -> Iterator[list[str]]:
    """The cells of each row of the first table below a heading, without the table's own."""
    section = re.search(rf"^#+ {heading}$(.*?)(?=^#|\Z)", _TEXT, re.M | re.S)
    assert section is not None, f"docs/reference.md has no section {heading}"
    lines = [line for line in section[1].splitlines() if line.startswith("|")]
    for line in lines[2:]:
        yield [cell.strip() for cell in line.strip("|").split("|")]


@dataclass(frozen=True)
class Label:
    """A label of a metric, and its values where they are fixed."""

    name: str
    values: frozenset[str]


def labels_of(cell: str) -> Iterator[Label]:
    """Of a cell like "`source`: `compute`, `kvshare_exact`; `rule`"."""
    for part in filter(None, cell.split("; ")):
        name, *values = _CODE.findall(part)
        yield Label(name, frozenset(values))


DOCUMENTED: Mapping[str, Mapping[str, frozenset[str]]] = {
    name: {label.name: label.values for label in labels_of(cells[1])}
    for cells in rows("Metrics")
    for name in _CODE.findall(cells[0])
}


@pytest.fixture(scope="module")
def circuits() -> Mapping[str, CircuitState]:
    schema = IndexSchema(kgram=8, window=9, max_fingerprints=64, embedder="", dimension=0)
    nominator = Nominator(QdrantRemoteIndex(schema, ":memory:"))
    nominator.close()
    return {part: circuit.state for part, circuit in nominator.circuits.items()}


def counted() -> Telemetry:
    """Each kind of count, once."""
    telemetry = Telemetry()
    for component in Component:
        telemetry.fallback(component, FallbackReason.ERROR)
    telemetry.replica_failed("replica-1")
    telemetry.evicted(EvictionCause.LOST)
    telemetry.evicted(EvictionCause.QUOTA, for_quota_of="acme")
    telemetry.executed(Decision.APPROX, Decision.FULL, Reason.SEGMENTS_GONE, {"write": 0.1})
    telemetry.answered(Decision.APPROX, num_steps=2, num_tokens=5)
    telemetry.unshared(Reason.MULTIMODAL)
    telemetry.ticket(TicketEvent.EXPIRED)
    return telemetry


def statuses(circuits: Mapping[str, CircuitState]) -> Iterator[EngineStatus]:
    """Of an engine that generates, and of a fleet."""
    index = IndexStatus(
        paused=None, num_waiting=0, free_bytes=1, store_bytes=1, num_foreign_hits=0, circuits=circuits
    )
    counts = counted().counts()
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
    replica = ReplicaStatus("replica-1", serves=True, shares=True, num_inflight=0, num_segments=0, kv_bytes=0)
    yield EngineStatus(
        True,
        "",
        index=index,
        counts=counts,
        replicas=(replica,),
        num_pending_tickets=0,
        tenant_bytes=lambda: {"a": 1},
    )


def request(decision: Decision) -> RequestRecord:
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


def _same(status: EngineStatus) -> EngineStatus:
    return status


@pytest.fixture(scope="module")
def exposed(circuits: Mapping[str, CircuitState]) -> Mapping[str, Mapping[str, set[str]]]:
    """Every metric of a server's registry: its name as it is scraped -> its labels -> their values."""
    found: dict[str, dict[str, set[str]]] = {}
    for status in statuses(circuits):
        metrics = Metrics(
            status=partial(_same, status),
            num_inflight=lambda: 0,
            parts=lambda _: dict.fromkeys(ServedPart, PartState.OK),
        )
        for decision in Decision:
            metrics.count(request(decision), endpoint="/v1/chat/completions", status=200)
        for family in metrics.registry.collect():
            labels = found.setdefault(f"{family.name}{'_total' if family.type == 'counter' else ''}", {})
            assert family.samples, f"{family.name} has no sample: let this test make one"
            for sample in family.samples:
                for name, value in sample.labels.items():
                    if name != "le":  # the edge of a histogram's bucket
                        labels.setdefault(name, set()).add(value)
    return found


def test_every_metric_is_documented_and_no_other(exposed: Mapping[str, Mapping[str, set[str]]]) -> None:
    """With exactly its labels."""
    assert {name: set(labels) for name, labels in exposed.items()} == {
        name: set(labels) for name, labels in DOCUMENTED.items()
    }


def test_every_label_value_that_is_seen_is_documented(
    exposed: Mapping[str, Mapping[str, set[str]]],
) -> None:
    """Where the documented values are fixed words."""
    for metric, labels in DOCUMENTED.items():
        for label, values in labels.items():
            free = {"replica-1"} if metric == "kvshare_fallback_total" else set()
            seen = {re.sub("^unshared:.*", "unshared:REASON", value) for value in exposed[metric][label]}
            assert not values or seen - free <= values, f"{metric}, {label}"


_FIXED = {
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


@pytest.mark.parametrize(("metric", "label"), _FIXED)
def test_label_values_are_those_of_the_enums(metric: str, label: str) -> None:
    assert DOCUMENTED[metric][label] == set(_FIXED[metric, label])


def test_every_circuit_is_documented(circuits: Mapping[str, CircuitState]) -> None:
    assert DOCUMENTED["kvshare_circuit_state"]["component"] == set(circuits)


def test_every_component_is_explained() -> None:
    """The table of components has each once, with reasons that there are."""
    table = list(rows("Components"))
    assert sorted(name for cells in table for name in _CODE.findall(cells[0])) == sorted(
        [*Component, "replica"]
    )
    assert {word for cells in table for word in _CODE.findall(cells[2])} == set(FallbackReason)


def test_every_error_code_is_documented_and_no_other() -> None:
    codes = [_CODE.findall(cells[0])[0] for cells in rows("Error codes")]
    assert sorted(codes) == sorted(ErrorCode)


def test_every_error_code_is_given_somewhere() -> None:
    """mypy finds a word that is no code; this finds a code that nothing gives any more."""
    files = (file for folder in ("kvshare", "proxy") for file in (_ROOT / folder).rglob("*.py"))
    given = {
        name for file in files for name in re.findall(r"\bErrorCode\.([A-Z_]+)\b", file.read_text("utf-8"))
    }
    assert given == {code.name for code in ErrorCode}


def test_every_reason_is_documented_as_clients_get_it() -> None:
    """The sentences are those of kvshare/reasons.py."""
    assert {_CODE.findall(cells[0])[0]: cells[1] for cells in rows("Reasons")} == explanations()
