"""
What is recorded of a request while it is answered, for its metrics; what the log says of it; and what
`/admin/requests` shows of the latest generating requests: plans, what came of them, times.

No prompt text and no tokens are in it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from time import perf_counter
from typing import Any

from aiohttp import web

from kvshare.engine import Delta, Finished
from kvshare.errors import RequestError
from kvshare.namespace import Owner
from kvshare.reasons import Reason, cache_miss_reason
from kvshare.requests import Decision, SharingMode, SharingReport, StoredPrompt
from kvshare.safe_logging import classes_and_places
from proxy.auth import ANONYMOUS, LOCAL, Caller
from proxy.errors import ErrorReply

log = logging.getLogger("proxy.middleware")  # the name that operators know

_MOST = 1024  # requests of which the history is known
_NUM_DIGITS = 6
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
class RequestFailure:
    """The error that a request was answered with. Without what it quotes of the client's text."""

    code: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, exc: Exception, reply: ErrorReply) -> RequestFailure:
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
    divided_owner: Owner | None = None  # the caller's owner, divided by the `cache_salt` of the body
    mode: SharingMode | None = None  # None: nothing was generated
    reports: dict[int, SharingReport] = field(default_factory=dict)  # by the number of the prompt
    finished: dict[int, Finished] = field(default_factory=dict)  # the same, of those that have ended
    tokenize_s: float | None = None
    first_token_s: float | None = None  # since the request came in
    token_gaps_s: list[float] = field(default_factory=list)
    finish_reason: str = ""  # OpenAI's, or "error" for a stream that broke off
    failure: RequestFailure | None = None
    disconnected: bool = False
    rules: tuple[str, ...] = ()  # those that rewrote its body
    unplanned: Reason | None = None  # why nothing could be planned for it
    executed: Callable[[], Mapping[str, Any]] = dict  # what the engine says was done, beside the plan
    _last_token: dict[int, float] = field(default_factory=dict)

    @property
    def owner(self) -> Owner:
        """Whose KV the request uses."""
        return self.divided_owner or self.caller.owner

    @property
    def duration_s(self) -> float:
        return perf_counter() - self.started

    @property
    def total(self) -> SharingReport:
        """One report of several prompts: counts added, else the boldest, the first reason. No donors."""
        reports = self.reports.values()
        decisions = {report.decision for report in reports}
        reasons = [report.reason for report in reports if report.reason is not None]
        predictions = [(each.decision == "approx", each.prediction) for each in reports if each.prediction]
        _, worst = max(predictions, key=lambda each: (each[0], each[1].expected), default=(False, None))
        return SharingReport(
            num_exact=sum(report.num_exact for report in reports),
            num_copied=sum(report.num_copied for report in reports),
            num_recomputed=sum(report.num_recomputed for report in reports),
            num_repaired=sum(report.num_repaired for report in reports),
            decision=next((decision for decision in Decision if decision in decisions), Decision.FULL),
            reason=reasons[0] if reasons else None,
            prediction=worst,
        )

    @property
    def reason(self) -> Reason | None:
        """Why not more was shared; of several prompts the first reason."""
        return self.total.reason if self.reports else self.unplanned

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
    words = [_WRITTEN.get(name, f"{name}={{}}").format(value) for name, value in fields.items()]
    log.log(level, "%s", " ".join(words), extra={"fields": fields})


def _generated(record: RequestRecord) -> dict[str, Any]:
    """What a generating request adds to its line. "-": not known here."""
    total, num_completion_tokens = record.total, record.num_completion_tokens
    fields = {
        "finish_reason": record.finish_reason or "-",
        "decision": total.decision if record.reports else "-",
        "reason": record.reason,
        "reused": total.num_cached,
        "recomputed": total.num_missed,
        "completion": "-" if num_completion_tokens is None else num_completion_tokens,
    }
    if (prediction := total.prediction) is not None:
        # How far the answer is expected to be off, or would have been, and how far it may be.
        name = "deviation" if total.decision == "approx" else "refused"
        fields |= {name: f"{prediction.expected:.2g}/{prediction.limit:g}", "repair": prediction.rule}
    return fields


def _loggable(exc: Exception, text: str) -> str:
    """A reply's text without the client's own words, on one line."""
    for quoted in exc.quoted if isinstance(exc, RequestError) else ():
        text = text.replace(quoted, "…") if quoted else text
    return "".join(letter if letter.isprintable() else " " for letter in text)


def log_failure(request_id: str, exc: Exception) -> None:
    """Log an error that is the server's."""
    log.error("request %s failed: %s", request_id, classes_and_places(exc))


class RequestHistory:
    """The latest requests that wanted something generated, by the id that their answers carry."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, Callable[[], dict[str, Any]]] = OrderedDict()

    def begin(self, record: RequestRecord, endpoint: str) -> None:
        """Its answer has begun. One that is not streamed begins when the request is over already."""
        if record.unique_id not in self._entries:
            self._set(record.unique_id, lambda: _document(record, endpoint, status=None))

    def end(self, record: RequestRecord, endpoint: str, status: int) -> None:
        """It is over. What the engine still learns of it is asked for when it is looked up."""
        document, executed = _document(record, endpoint, status=status), record.executed
        self._set(record.unique_id, lambda: {**document, **executed()})

    def get(self, unique_id: str) -> dict[str, Any] | None:
        """JSON-ready; None where it is unknown, or too long ago."""
        entry = self._entries.get(unique_id)
        return None if entry is None else entry()

    def latest(self, count: int) -> list[dict[str, Any]]:
        """Newest first."""
        return [entry() for entry in islice(reversed(self._entries.values()), count)]

    def _set(self, unique_id: str, entry: Callable[[], dict[str, Any]]) -> None:
        self._entries[unique_id] = entry
        if len(self._entries) > _MOST:
            self._entries.popitem(last=False)


def client_of(request: web.Request) -> str:
    """Whose request it is, by key; by address where there are no keys."""
    caller = request[RECORD].caller
    return f"{caller.name} {request.remote}" if caller is LOCAL else caller.name


def stored_documents(stored: Iterable[StoredPrompt]) -> dict[str, Any]:
    """What each prompt of a request was stored as, so far."""
    return {"stored": [{"node": entry.node, "settled": entry.is_settled} for entry in stored]}


def _document(record: RequestRecord, endpoint: str, *, status: int | None) -> dict[str, Any]:
    reports = [report for _, report in sorted(record.reports.items())]
    stages: dict[str, float] = {}
    for finished in record.finished.values():
        for stage, seconds in finished.stage_seconds.items():
            stages[stage] = stages.get(stage, 0.0) + seconds
    times = {"total": record.duration_s, "tokenize": record.tokenize_s, "first_token": record.first_token_s}
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
        # None where the prompt was not tokenized here.
        "cache_missed_input_tokens": sum(report.num_missed for report in reports) if reports else None,
        "prompts": [_planned(report) for report in reports],
        "completion_tokens": record.num_completion_tokens,
        "seconds": {
            name: None if seconds is None else round(seconds, _NUM_DIGITS)
            for name, seconds in (times | stages).items()
        },
        **record.executed(),
    }


def tokens_by_source(report: SharingReport) -> dict[str, int]:
    """Where the KV of a prompt's tokens comes from, by the names that clients and operators read."""
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
        "donors": [int(donor) for donor in report.donors],
        "prediction": prediction
        and {"expected": prediction.expected, "limit": prediction.limit, "rule": prediction.rule},
    }
