"""The counters of a server: typed, thread-safe, and complete for all that the index reports."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

import pytest

from kvshare.reasons import Reason
from kvshare.requests import Decision
from kvshare.telemetry import (
    Component,
    Counts,
    EvictionCause,
    FallbackReason,
    Telemetry,
    TicketEvent,
)
from vector_index import CircuitState, FailureReason, IndexSchema, Nominator
from vector_index.qdrant_remote import QdrantRemoteIndex

_THREADS, _TIMES = 4, 50


class _Slow(int):
    """A number during whose addition other threads run: without a lock they would add to the same sum."""

    def __radd__(self, other: int) -> int:
        time.sleep(1e-5)
        return other + int(self)


@pytest.mark.parametrize(
    ("write", "read"),
    [
        (lambda t: t.evicted(EvictionCause.END, _Slow(1)), lambda c: c.evictions[EvictionCause.END]),
        (lambda t: t.ticket(TicketEvent.EXPIRED, _Slow(1)), lambda c: c.tickets[TicketEvent.EXPIRED]),
        (lambda t: t.generated(_Slow(1)), lambda c: c.num_generated_tokens),
    ],
    ids=["evicted", "ticket", "generated"],
)
def test_no_count_is_lost_between_threads(
    write: Callable[[Telemetry], None], read: Callable[[Counts], int]
) -> None:
    """Several threads count while another one reads; the sum is exact, and never shrinks."""
    telemetry, seen = Telemetry(), [0]

    def write_all() -> None:
        for _ in range(_TIMES):
            write(telemetry)

    threads = [threading.Thread(target=write_all) for _ in range(_THREADS)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        seen.append(read(telemetry.counts()))
    assert read(telemetry.counts()) == _THREADS * _TIMES
    assert seen == sorted(seen)


def test_counts_are_kept_apart_by_what_they_name() -> None:
    telemetry = Telemetry()
    telemetry.fallback(Component.STORE, FallbackReason.NO_ROOM)
    telemetry.fallback(Component.TIER, FallbackReason.MISSING)
    telemetry.replica_failed("a")
    telemetry.evicted(EvictionCause.LOST, 3)
    telemetry.executed(Decision.APPROX, Decision.FULL, Reason.SEGMENTS_GONE)
    telemetry.executed(Decision.EXACT, Decision.EXACT, None)
    telemetry.unshared(Reason.LORA)
    telemetry.ticket(TicketEvent.EXPIRED, 2)
    counts = telemetry.counts()
    assert counts.fallbacks == {
        (Component.STORE, FallbackReason.NO_ROOM): 1,
        (Component.TIER, FallbackReason.MISSING): 1,
    }
    assert counts.replica_failures == {"a": 1}
    assert counts.evictions == {EvictionCause.LOST: 3}
    assert counts.executions == {
        (Decision.APPROX, Decision.FULL, Reason.SEGMENTS_GONE): 1,
        (Decision.EXACT, Decision.EXACT, None): 1,
    }
    assert counts.unshared == {Reason.LORA: 1}
    assert counts.tickets == {TicketEvent.EXPIRED: 2}
    assert (counts.num_isolation_denials, counts.num_generated_tokens) == (0, 0)


def test_an_eviction_for_a_quota_is_counted_for_its_tenant_too() -> None:
    """Whole prompts and ends of prompts; those for want of memory are nobody's."""
    telemetry = Telemetry()
    telemetry.evicted(EvictionCause.CAPACITY)
    telemetry.evicted(EvictionCause.QUOTA, for_quota_of="acme")
    telemetry.evicted(EvictionCause.END, for_quota_of="acme")
    counts = telemetry.counts()
    assert counts.tenant_evictions == {"acme": 2}
    assert counts.evictions == dict.fromkeys(
        (EvictionCause.CAPACITY, EvictionCause.QUOTA, EvictionCause.END), 1
    )


def test_counts_that_were_read_stay_as_they_were() -> None:
    telemetry = Telemetry()
    telemetry.evicted(EvictionCause.CAPACITY)
    before = telemetry.counts()
    telemetry.evicted(EvictionCause.CAPACITY)
    assert before.evictions == {EvictionCause.CAPACITY: 1}


@pytest.mark.parametrize(
    "values", [CircuitState, Component, EvictionCause, FallbackReason, Reason, TicketEvent]
)
def test_values_of_labels_are_one_word(values: type[StrEnum]) -> None:
    """Small letters and underscores, so that a query needs no care; the event of a ticket has a colon."""
    assert [value for value in values if re.fullmatch(r"(tickets:)?[a-z][a-z_]*", value) is None] == []


def test_the_glossary_has_every_component() -> None:
    """And the replica, which is counted by its name."""
    text = (Path(__file__).parents[2] / "docs" / "glossary.md").read_text(encoding="utf-8")
    rows = text.split("\n| component | what fails |\n")[1].split("\n\n")[0].splitlines()
    words = {word for row in rows for word in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert words == {*Component, "replica"}


def test_whatever_the_index_reports_can_be_counted() -> None:
    """Each circuit of the index is a component, and each reason of its failures a reason of a fallback."""
    schema = IndexSchema(kgram=8, window=9, max_fingerprints=64, embedder="", dimension=0)
    nominator = Nominator(QdrantRemoteIndex(schema, ":memory:"))
    assert {Component(part) for part in nominator.circuits} <= set(Component)
    assert {FallbackReason(reason) for reason in FailureReason} <= set(FallbackReason)
    nominator.close()
