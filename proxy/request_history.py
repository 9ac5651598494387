"""
The latest generating requests, for `/admin/requests`: plans, their outcomes, times.

No prompt text and no tokens are in it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

from kvshare.reasons import cache_miss_reason
from kvshare.requests import SharingReport, StoredPrompt
from proxy.request_record import RequestRecord

_MOST = 1024  # requests of which the history is known
_NUM_DIGITS = 6


class RequestHistory:
    """The latest requests that wanted something generated, by the id that their answers carry."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, Callable[[], dict[str, Any]]] = OrderedDict()

    def begin(self, record: RequestRecord, endpoint: str) -> None:
        if record.unique_id not in self._entries:
            self._set(record.unique_id, lambda: _document(record, endpoint, status=None))

    def end(self, record: RequestRecord, endpoint: str, status: int) -> None:
        """Note that it is over. What the engine learns of it later is read when the request is looked up."""
        document, executed = _document(record, endpoint, status=status), record.preparation.executed
        self._set(record.unique_id, lambda: {**document, **executed()})

    def get(self, unique_id: str) -> dict[str, Any] | None:
        """JSON-ready; None where it is unknown, or too long ago."""
        entry = self._entries.get(unique_id)
        return None if entry is None else entry()

    def latest(self, count: int, tenant: str | None = None) -> list[dict[str, Any]]:
        """Newest first; only those of a tenant, if one is named."""
        documents = (entry() for entry in reversed(self._entries.values()))
        chosen = (each for each in documents if tenant is None or each["tenant"] == tenant)
        return list(islice(chosen, count))

    def _set(self, unique_id: str, entry: Callable[[], dict[str, Any]]) -> None:
        self._entries[unique_id] = entry
        if len(self._entries) > _MOST:
            self._entries.popitem(last=False)


def stored_documents(stored: Iterable[StoredPrompt]) -> dict[str, Any]:
    """Return the nodes that prompts were stored as, so far, and what was measured of their answers."""
    return {
        "stored": [
            {"node": entry.node, "settled": entry.is_settled, "deviation": entry.deviation}
            for entry in stored
        ]
    }


def _document(record: RequestRecord, endpoint: str, *, status: int | None) -> dict[str, Any]:
    reports = [report for _, report in sorted(record.answer.reports.items())]
    stages = record.preparation.stages
    for finished in record.answer.finished.values():
        for stage, seconds in finished.stage_seconds.items():
            stages[stage] = stages.get(stage, 0.0) + seconds
    times = {
        "total": record.duration_s,
        "tokenize": record.preparation.tokenize_s,
        "first_token": record.answer.first_token_s,
    }
    return {
        "id": record.unique_id,
        "x_request_id": record.request_id,
        "key": record.admission.caller.name,
        "tenant": record.admission.caller.tenant,
        "at": round(time.time() - record.duration_s, 3),  # when it came in, in Unix seconds
        "endpoint": endpoint,
        "mode": record.preparation.mode,
        "status": status,  # None: its answer is under way
        "finish_reason": record.answer.ended_as or None,
        "rules": list(record.body.rules),
        "cache_miss_reason": cache_miss_reason(record.reason),
        # None where the prompt was not tokenized here.
        "cache_missed_input_tokens": sum(report.num_missed for report in reports) if reports else None,
        "prompts": [_planned(report) for report in reports],
        "completion_tokens": record.answer.num_completion_tokens,
        "seconds": {
            name: None if seconds is None else round(seconds, _NUM_DIGITS)
            for name, seconds in (times | stages).items()
        },
        **record.preparation.executed(),
    }


def tokens_by_source(report: SharingReport) -> dict[str, int]:
    """Count a prompt's tokens by where their KV comes from, with the names that users read."""
    reused = {"exact": report.num_exact, "copied": report.num_copied}
    return {**reused, "recomputed": report.num_recomputed, "repaired": report.num_repaired}


def _planned(report: SharingReport) -> dict[str, Any]:
    prediction = report.prediction
    return {
        "decision": report.decision,
        "reason": report.reason,
        "prompt_tokens": report.num_prompt_tokens,
        **tokens_by_source(report),
        "first_difference": report.first_difference,
        "saved_s": round(report.saved_s, _NUM_DIGITS),
        "donors": [int(donor) for donor in report.donors],
        "prediction": prediction
        and {
            "expected": prediction.expected,
            "bound": prediction.bound,
            "limit": prediction.limit,
            "rule": prediction.rule,
        },
    }
