"""
What happened to the last generating requests, for `/admin/requests`: plans, what came of them, times.

No prompt text and no tokens are in it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from kvshare.reasons import cache_miss_reason
from kvshare.requests import Prediction, SharingReport
from proxy.request_log import RequestRecord

_MOST = 1024
_NUM_DIGITS = 6


class RequestHistory:
    """The last `most` requests that wanted something generated, by the id that their answers carry."""

    def __init__(self, *, most: int = _MOST) -> None:
        self._most = most
        self._entries: OrderedDict[str, Callable[[], dict[str, Any]]] = OrderedDict()

    def begin(self, record: RequestRecord, endpoint: str) -> None:
        """Its answer has begun."""
        if record.unique_id not in self._entries:
            self._entries[record.unique_id] = lambda: _document(record, endpoint, status=None)
            if len(self._entries) > self._most:
                self._entries.popitem(last=False)

    def end(self, record: RequestRecord, endpoint: str, status: int) -> None:
        """It is over. What the engine still learns of it is asked for when it is looked up."""
        self.begin(record, endpoint)
        if record.unique_id in self._entries:
            document, executed = _document(record, endpoint, status=status), record.executed
            self._entries[record.unique_id] = lambda: {**document, **executed()}

    def get(self, unique_id: str) -> dict[str, Any] | None:
        """JSON-ready; None where it is unknown, or too long ago."""
        entry = self._entries.get(unique_id)
        return None if entry is None else entry()

    def latest(self, count: int) -> list[dict[str, Any]]:
        """Newest first."""
        newest = list(self._entries.values())[-count:] if count else []
        return [entry() for entry in reversed(newest)]


def _document(record: RequestRecord, endpoint: str, *, status: int | None) -> dict[str, Any]:
    return {
        "id": record.unique_id,
        "x_request_id": record.request_id,
        "key": record.caller.name,
        "endpoint": endpoint,
        "mode": record.mode,
        "status": status,  # None: its answer is under way
        "finish_reason": record.finish_reason or None,
        "rules": list(record.rules),
        "cache_miss_reason": cache_miss_reason(record.reason),
        "cache_missed_input_tokens": _missed(record),
        "prompts": [_planned(record.reports[number]) for number in sorted(record.reports)],
        "completion_tokens": record.num_completion_tokens,
        "seconds": {
            "total": round(record.duration_s, _NUM_DIGITS),
            "tokenize": _rounded(record.tokenize_s),
            "first_token": _rounded(record.first_token_s),
            **_stages([finished.stage_seconds for finished in record.finished.values()]),
        },
        **record.executed(),
    }


def _missed(record: RequestRecord) -> int | None:
    """None where the prompt was not tokenized here."""
    return sum(report.num_missed for report in record.reports.values()) if record.reports else None


def _planned(report: SharingReport) -> dict[str, Any]:
    return {
        "decision": report.decision,
        "reason": report.reason,
        "prompt_tokens": report.num_prompt_tokens,
        "exact": report.num_exact,
        "copied": report.num_copied,
        "recomputed": report.num_recomputed,
        "repaired": report.num_repaired,
        "first_difference": report.first_difference,
        "donors": [int(donor) for donor in report.donors],
        "prediction": None if report.prediction is None else _predicted(report.prediction),
    }


def _predicted(prediction: Prediction) -> dict[str, Any]:
    return {"expected": prediction.expected, "limit": prediction.limit, "rule": prediction.rule}


def _stages(each: list[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for stages in each for name in stages)
    return {name: round(sum(stages.get(name, 0.0) for stages in each), _NUM_DIGITS) for name in names}


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, _NUM_DIGITS)
