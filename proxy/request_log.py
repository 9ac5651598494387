"""
What is recorded of a request while it is answered, for its metrics; and what the log says of it.

No prompt text is in either.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from aiohttp import web

from kvshare.engines.base import Delta, Finished
from kvshare.errors import RequestError
from kvshare.reasons import Reason
from kvshare.requests import Decision, Prediction, SharingMode, SharingReport
from kvshare.safe_logging import classes_and_places
from proxy.auth import ANONYMOUS, Caller
from proxy.errors import ErrorReply

log = logging.getLogger("proxy.middleware")  # the name that operators know

_QUIET = ("/health", "/ready", "/metrics")
_WRITTEN = {  # of a request's fields those that are not written as name=value
    "request_id": "request {}",
    "endpoint": "{}",
    "status": "{}",
    "finish_reason": "{}",
    "duration_ms": "{} ms",
    "error_message": '"{}"',
}


@dataclass(frozen=True, slots=True)
class Failure:
    """The error that a request was answered with. Without what it quotes of the client's text."""

    code: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, exc: Exception, reply: ErrorReply) -> Failure:
        """`reply`: what the client got for `exc`."""
        code, param = reply.code or reply.type, reply.param
        return cls(code, _loggable(exc, reply.message), None if param is None else _loggable(exc, param))


@dataclass(slots=True)
class RequestRecord:
    """Filled in as the request goes on; read once, when it is over."""

    request_id: str  # the client's, if it gave one
    unique_id: str  # ours: no other request has it
    started: float = field(default_factory=perf_counter)
    caller: Caller = ANONYMOUS
    mode: SharingMode | None = None  # None: nothing was generated
    reports: dict[int, SharingReport] = field(default_factory=dict)  # by the number of the prompt
    finished: dict[int, Finished] = field(default_factory=dict)  # the same, of those that have ended
    tokenize_s: float | None = None
    first_token_s: float | None = None  # since the request came in
    token_gaps_s: list[float] = field(default_factory=list)
    finish_reason: str = ""  # OpenAI's, or "error" for a stream that broke off
    failure: Failure | None = None
    disconnected: bool = False
    rules: tuple[str, ...] = ()  # those that rewrote its body
    unplanned: Reason | None = None  # why nothing could be planned for it
    executed: Callable[[], Mapping[str, Any]] = dict  # what the engine says was done, beside the plan
    _last_token: dict[int, float] = field(default_factory=dict)

    @property
    def duration_s(self) -> float:
        return perf_counter() - self.started

    @property
    def reason(self) -> Reason | None:
        """Why not more was shared; of several prompts the first reason."""
        return combine(self.reports.values()).reason if self.reports else self.unplanned

    @property
    def num_completion_tokens(self) -> int | None:
        """None for a relayed answer, whose tokens were not counted here."""
        if not self.finished:
            return None
        return sum(finished.num_completion_tokens for finished in self.finished.values())

    def note(self, delta: Delta) -> None:
        """Take the time of a delta."""
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
        if not delta.num_tokens:
            return
        now = perf_counter()
        if self.first_token_s is None:
            self.first_token_s = now - self.started
        before = self._last_token.get(delta.choice)
        if before is not None:
            self.token_gaps_s.append((now - before) / delta.num_tokens)
        self._last_token[delta.choice] = now


RECORD: web.RequestKey[RequestRecord] = web.RequestKey("record", RequestRecord)


def combine(reports: Collection[SharingReport]) -> SharingReport:
    """One report of several prompts: counts added, the boldest of all else, the first reason. No donors."""
    decisions = {report.decision for report in reports}
    return SharingReport(
        num_exact=sum(report.num_exact for report in reports),
        num_copied=sum(report.num_copied for report in reports),
        num_recomputed=sum(report.num_recomputed for report in reports),
        num_repaired=sum(report.num_repaired for report in reports),
        decision=next((decision for decision in Decision if decision in decisions), Decision.FULL),
        reason=next((report.reason for report in reports if report.reason is not None), None),
        prediction=_worst([r for r in reports if r.decision == "approx"]) or _worst(reports),
    )


def log_request(record: RequestRecord, endpoint: str, status: int, client: str) -> None:
    """
    The one line of a request that is over. As JSON it has the same as members.

    `client`: the address that the connection came from, which may be a reverse proxy's.
    """
    fields: dict[str, Any] = {"request_id": record.request_id}
    if record.request_id != record.unique_id:
        fields["id"] = record.unique_id
    fields |= {"key": record.caller.name, "endpoint": endpoint, "status": status}
    fields |= {} if record.mode is None else _generated(record)
    if record.rules:
        fields["rules"] = ",".join(record.rules)
    fields |= {"duration_ms": round(record.duration_s * 1e3, 1), "client": client}
    if (failure := record.failure) is not None:
        fields |= {"error": failure.code, "param": failure.param, "error_message": failure.message}
    fields = {name: value for name, value in fields.items() if value is not None}
    level = logging.DEBUG if endpoint in _QUIET else logging.INFO
    log.log(level, "%s", _line(fields), extra={"fields": fields})


def _line(fields: Mapping[str, Any]) -> str:
    """The fields in their order, each by its name but for those that need none."""
    return " ".join(_WRITTEN.get(name, f"{name}={{}}").format(value) for name, value in fields.items())


def _generated(record: RequestRecord) -> dict[str, Any]:
    """What a generating request adds to its line. "-": not known here."""
    total, num_completion_tokens = combine(record.reports.values()), record.num_completion_tokens
    fields = {
        "finish_reason": record.finish_reason or "-",
        "decision": total.decision if record.reports else "-",
        "reason": record.reason,
        "reused": total.num_cached,
        "recomputed": total.num_recomputed + total.num_repaired,
        "completion": "-" if num_completion_tokens is None else num_completion_tokens,
    }
    if (prediction := total.prediction) is not None:
        # How far the answer is expected to be off, or would have been, and how far it may be.
        name = "deviation" if total.decision == "approx" else "refused"
        fields |= {name: f"{prediction.expected:.2g}/{prediction.limit:g}", "repair": prediction.rule}
    return fields


def _worst(reports: Collection[SharingReport]) -> Prediction | None:
    return max(
        (report.prediction for report in reports if report.prediction is not None),
        key=lambda prediction: prediction.expected,
        default=None,
    )


def _loggable(exc: Exception, text: str) -> str:
    """A reply's text without the client's own words, on one line."""
    for quoted in exc.quoted if isinstance(exc, RequestError) else ():
        text = text.replace(quoted, "…") if quoted else text
    return "".join(letter if letter.isprintable() else " " for letter in text)


def log_failure(request_id: str, exc: Exception) -> None:
    """Log an error that is the server's."""
    log.error("request %s failed: %s", request_id, classes_and_places(exc))
