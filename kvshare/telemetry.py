"""
The counts of a running server, in fixed words: failures of parts, evictions, outcomes of plans.

Written from any thread; read by the metrics, replay and benchmarks as one `Counts`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TypeVar

from kvshare.reasons import Reason
from kvshare.requests import Decision

_Key = TypeVar("_Key")


class Component(StrEnum):
    """A part that requests are served without where it fails. The last five are the circuits of the index."""

    SHARING = "sharing"  # lookup and planning of one prompt
    PLANNING = "planning"  # the same for all replicas
    TIER = "tier"  # reading stored KV
    STORE = "store"  # storing a prompt and its KV
    FINGERPRINT = "fingerprint"  # search by fingerprints
    EMBEDDING = "embedding"  # search by embedding
    EMBEDDER = "embedder"  # embedding a prompt, for a search or to be stored
    INDEXING = "indexing"  # writing the index
    INDEX_EMBEDDER = "index_embedder"  # embedding a stored prompt


class FallbackReason(StrEnum):
    """The reason why a request was served without a part."""

    ERROR = "error"
    TIMEOUT = "timeout"
    CIRCUIT_OPEN = "circuit_open"
    BACKLOG = "backlog"
    MISSING = "missing"
    REFUSED = "refused"
    NO_ROOM = "no_room"
    TOO_LARGE = "too_large"
    DONOR_GONE = "donor_gone"


class EvictionCause(StrEnum):
    """The reason why a prompt, or the end of one, left the tree."""

    CAPACITY = "capacity"
    END = "end"
    LOST = "lost"
    QUOTA = "quota"  # of its tenant


class TicketEvent(StrEnum):
    """A request that its replica did not report in time, or a report of an unknown request."""

    EXPIRED = "tickets:expired"
    UNKNOWN = "tickets:unknown"


@dataclass(slots=True)
class Counts:
    """All counts at one moment; what is not in a counter was counted zero times. They only grow."""

    fallbacks: Counter[tuple[Component, FallbackReason]] = field(default_factory=Counter)
    replica_failures: Counter[str] = field(default_factory=Counter)  # by the name of the replica
    evictions: Counter[EvictionCause] = field(default_factory=Counter)
    tenant_evictions: Counter[str] = field(default_factory=Counter)  # of them, by tenant: for its own quota
    # By what was planned, what was computed, and why less was shared than planned.
    executions: Counter[tuple[Decision, Decision, Reason | None]] = field(default_factory=Counter)
    vllm_seconds: Counter[str] = field(default_factory=Counter)  # that replicas report, by stage
    # Of answers that were decoded speculatively, by what was computed: steps after the first token, and
    # tokens that these gave.
    answer_steps: Counter[Decision] = field(default_factory=Counter)
    answer_tokens: Counter[Decision] = field(default_factory=Counter)
    unshared: Counter[Reason] = field(default_factory=Counter)  # requests that could not be planned
    tickets: Counter[TicketEvent] = field(default_factory=Counter)
    num_isolation_denials: int = 0
    num_generated_tokens: int = 0


class Telemetry:
    """The counters of one server. Thread-safe; no method blocks for longer than an addition takes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = Counts()

    def fallback(self, component: Component, reason: FallbackReason) -> None:
        """A request was served, or a prompt left unstored, as a part failed."""
        self._add(self._counts.fallbacks, (component, reason))

    def replica_failed(self, name: str) -> None:
        """A replica did not take a request, which then went to another one."""
        self._add(self._counts.replica_failures, name)

    def evicted(self, cause: EvictionCause, num_prompts: int = 1, *, for_quota_of: str | None = None) -> None:
        """Prompts, or ends of prompts, left the tree. `for_quota_of`: a tenant that has reached its own."""
        self._add(self._counts.evictions, cause, num_prompts)
        if for_quota_of is not None:
            self._add(self._counts.tenant_evictions, for_quota_of, num_prompts)

    def executed(
        self,
        planned: Decision,
        done: Decision,
        reason: Reason | None,
        stage_seconds: Mapping[str, float] | None = None,
    ) -> None:
        """A replica reported what it made of a plan, and how long each stage of it took (seconds)."""
        self._add(self._counts.executions, (planned, done, reason))
        with self._lock:
            self._counts.vllm_seconds.update(stage_seconds or {})

    def answered(self, done: Decision, *, num_steps: int, num_tokens: int) -> None:
        """A replica reported how many steps an answer took, which it decoded speculatively."""
        self._add(self._counts.answer_steps, done, num_steps)
        self._add(self._counts.answer_tokens, done, num_tokens)

    def unshared(self, reason: Reason) -> None:
        self._add(self._counts.unshared, reason)

    def ticket(self, event: TicketEvent, num_tickets: int = 1) -> None:
        """Tickets expired, or a report came of one that is not known."""
        self._add(self._counts.tickets, event, num_tickets)

    def isolation_denied(self) -> None:
        """A candidate of another namespace reached planning and was dropped."""
        with self._lock:
            self._counts.num_isolation_denials += 1

    def generated(self, num_tokens: int) -> None:
        with self._lock:
            self._counts.num_generated_tokens += num_tokens

    def counts(self) -> Counts:
        with self._lock:
            return Counts(*(copy(getattr(self._counts, each.name)) for each in fields(Counts)))

    def _add(self, counter: Counter[_Key], key: _Key, number: int = 1) -> None:
        with self._lock:
            counter[key] += number
