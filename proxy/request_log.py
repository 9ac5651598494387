"""Writes one log line for each finished request, and the server's own errors."""

from __future__ import annotations

import logging
from typing import Any

from kvshare.safe_logging import classes_and_places
from proxy.request_record import RequestRecord

log = logging.getLogger("proxy.middleware")  # the name that operators know

_QUIET = ("/health", "/ready", "/status", "/metrics")
_WRITTEN = {  # of a request's fields those that are not written as name=value
    "request_id": "request {}",
    "endpoint": "{}",
    "status": "{}",
    "finish_reason": "{}",
    "duration_ms": "{} ms",
    "error_message": '"{}"',
}


def log_request(record: RequestRecord, endpoint: str, status: int, client: str) -> None:
    """
    The one line of a request that is over. As JSON it has the same as members.

    `client`: the address that the connection came from, which may be a reverse proxy's.
    """
    fields: dict[str, Any] = {"request_id": record.request_id}
    if record.request_id != record.unique_id:
        fields["id"] = record.unique_id
    if record.trace is not None:
        fields["trace"] = record.trace.trace_id
    fields |= {"key": record.admission.caller.name, "endpoint": endpoint, "status": status}
    fields |= {} if record.preparation.mode is None else _generated(record)
    if record.body.rules:
        fields["rules"] = ",".join(record.body.rules)
    fields |= {"duration_ms": round(record.duration_s * 1e3, 1), "client": client}
    if (failure := record.failure) is not None:
        fields |= {"error": failure.code, "param": failure.param, "error_message": failure.message}
    fields = {name: value for name, value in fields.items() if value is not None}
    level = logging.DEBUG if endpoint in _QUIET else logging.INFO
    words = [_WRITTEN.get(name, f"{name}={{}}").format(value) for name, value in fields.items()]
    log.log(level, "%s", " ".join(words), extra={"fields": fields})


def _generated(record: RequestRecord) -> dict[str, Any]:
    """Return the fields that a generating request adds to its line. "-": not known here."""
    total, num_completion_tokens = record.answer.total, record.answer.num_completion_tokens
    fields = {
        "finish_reason": record.answer.ended_as or "-",
        "decision": total.decision if record.answer.reports else "-",
        "reason": record.reason,
        "reused": total.num_cached,
        "recomputed": total.num_missed,
        "completion": "-" if num_completion_tokens is None else num_completion_tokens,
    }
    if (prediction := total.prediction) is not None:
        # How far the answer may be off but for the allowed risk, or might have been, and the limit of that.
        name = "deviation" if total.decision == "approx" else "refused"
        fields |= {name: f"{prediction.bound:.2g}/{prediction.limit:g}", "repair": prediction.rule}
    return fields


def log_failure(request_id: str, exc: Exception) -> None:
    log.error("request %s failed: %s", request_id, classes_and_places(exc))
