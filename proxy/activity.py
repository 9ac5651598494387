"""
Counts what generating requests reused, saved and cost in the last day, by minute, for the dashboard.

Counts only. Tenants and keys are configured ones, so nothing here grows with what clients send.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from kvshare.requests import SharingReport
from proxy.request_record import RequestRecord

MOST_MINUTES = 24 * 60
_MINUTE_S = 60
_T = TypeVar("_T")
_MOST_BINS = 60
_MOST_NAMED = 100


@dataclass(slots=True)
class Sums:
    """Over some requests. `spent_s`: their lookups; `saved_s`: by their plans' estimates, before lookups."""

    requests: int = 0
    failed: int = 0  # 5xx, or an answer that broke off
    exact: int = 0  # tokens, as the next three
    copied: int = 0
    repaired: int = 0
    recomputed: int = 0
    saved_s: float = 0.0
    spent_s: float = 0.0

    def add(self, other: Sums) -> None:
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(other, name))


_SUMMED = tuple(Sums.__dataclass_fields__)


@dataclass(slots=True)
class Outcomes:
    """Prompts with one decision for one reason. `expected`, `bound`: nats, of those that were predicted."""

    prompts: int = 0
    prompt_tokens: int = 0
    computed: int = 0  # tokens
    predicted: int = 0  # prompts
    expected: float = 0.0  # sum
    bound: float = 0.0  # largest
    limit: float = 0.0  # largest

    def count(self, report: SharingReport) -> None:
        self.prompts += 1
        self.prompt_tokens += report.num_prompt_tokens
        self.computed += report.num_missed
        if (prediction := report.prediction) is not None:
            self.predicted += 1
            self.expected += prediction.expected
            self.bound = max(self.bound, prediction.bound)
            self.limit = max(self.limit, prediction.limit)

    def add(self, other: Outcomes) -> None:
        for name in ("prompts", "prompt_tokens", "computed", "predicted", "expected"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.bound, self.limit = max(self.bound, other.bound), max(self.limit, other.limit)


_Key = tuple[str, str]
"""A tenant, and the name of one of its keys."""
_Decided = tuple[str, str | None]
"""A decision, and why no more was shared."""


@dataclass(slots=True)
class _Minute:
    number: int  # since 1970
    keys: defaultdict[_Key, Sums] = field(default_factory=lambda: defaultdict(Sums))
    decided: defaultdict[_Decided, Outcomes] = field(default_factory=lambda: defaultdict(Outcomes))


class Activity:
    """Sums over the requests of the last day. Used on the event loop only."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._since = clock()
        self._minutes: deque[_Minute] = deque(maxlen=MOST_MINUTES)

    def count(self, record: RequestRecord, status: int) -> None:
        """Add a request that is over; one that generates nothing is left out."""
        if record.preparation.mode is None:
            return
        minute, total, caller = self._minute(), record.answer.total, record.admission.caller
        minute.keys[caller.tenant, caller.name].add(
            Sums(
                requests=1,
                failed=int(status >= 500 or record.answer.broken_off is not None),
                exact=total.num_exact,
                copied=total.num_copied,
                repaired=total.num_repaired,
                recomputed=total.num_recomputed,
                saved_s=total.saved_s,
                spent_s=record.lookup_s,
            )
        )
        for report in record.answer.reports.values():
            minute.decided[report.decision, report.reason].count(report)

    def document(self, minutes: int) -> dict[str, Any]:
        """
        The last so many minutes, JSON-ready: in at most 60 bins of whole minutes, by tenant and by key, and
        by decision.

        `bins` has those in which something happened; the hundred tenants and keys that reused most are named.
        """
        now = int(self._clock()) // _MINUTE_S
        step = -(-minutes // _MOST_BINS)
        first = now - minutes + 1
        recent = [minute for minute in self._minutes if minute.number >= first]
        bins: defaultdict[int, Sums] = defaultdict(Sums)
        tenants: defaultdict[str, Sums] = defaultdict(Sums)
        keys: defaultdict[_Key, Sums] = defaultdict(Sums)
        decided: defaultdict[_Decided, Outcomes] = defaultdict(Outcomes)
        for minute in recent:
            for (tenant, key), sums in minute.keys.items():
                bins[(minute.number - first) // step].add(sums)
                tenants[tenant].add(sums)
                keys[tenant, key].add(sums)
            for of_decision, outcomes in minute.decided.items():
                decided[of_decision].add(outcomes)
        return {
            "since": self._since,
            "start": first * _MINUTE_S,
            "step_s": step * _MINUTE_S,
            "num_bins": -(-minutes // step),
            "total": asdict(_sum(tenants.values())),
            "bins": [{"bin": place, **asdict(sums)} for place, sums in sorted(bins.items())],
            "num_tenants": len(tenants),
            "tenants": [{"tenant": tenant, **asdict(sums)} for tenant, sums in _most(tenants)],
            "num_keys": len(keys),
            "keys": [{"tenant": tenant, "key": key, **asdict(sums)} for (tenant, key), sums in _most(keys)],
            "decisions": [
                {"decision": decision, "reason": reason, **_means(outcomes)}
                for (decision, reason), outcomes in sorted(decided.items(), key=lambda row: -row[1].prompts)
            ],
        }

    def _minute(self) -> _Minute:
        number = int(self._clock()) // _MINUTE_S
        if not self._minutes or self._minutes[-1].number < number:
            self._minutes.append(_Minute(number))
        return self._minutes[-1]


def _most(sums: Mapping[_T, Sums]) -> list[tuple[_T, Sums]]:
    return sorted(sums.items(), key=lambda entry: -(entry[1].exact + entry[1].copied))[:_MOST_NAMED]


def _sum(parts: Iterable[Sums]) -> Sums:
    total = Sums()
    for part in parts:
        total.add(part)
    return total


def _means(outcomes: Outcomes) -> dict[str, Any]:
    """The same with the mean of what was expected; None where nothing was predicted."""
    has_predictions = outcomes.predicted > 0
    return {
        "prompts": outcomes.prompts,
        "prompt_tokens": outcomes.prompt_tokens,
        "computed": outcomes.computed,
        "predicted": outcomes.predicted,
        "expected": outcomes.expected / outcomes.predicted if has_predictions else None,
        "bound": outcomes.bound if has_predictions else None,
        "limit": outcomes.limit if has_predictions else None,
    }
