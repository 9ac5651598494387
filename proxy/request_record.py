"""
The record of a request while it is answered, for its metrics, its line in the log, and the history.

    RequestRecord        the request's ids, and the four parts below    frozen, made when the request comes in
    AdmissionRecord      who sent it, and the error of its handler      by the middleware
    BodyRecord           what its body and the operator's rules say     by the reader of bodies
    PreparationRecord    what is generated for it, and how              by the routes that generate
    AnswerRecord         what came of it                                by what writes or relays its answer

docs/architecture.md names the writer of each field. No prompt text and no tokens are in a record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

from aiohttp import web

from kvshare.engine import Finished
from kvshare.errors import RequestError
from kvshare.namespace import Owner
from kvshare.reasons import Reason
from kvshare.requests import Decision, Prediction, SharingMode, SharingReport
from proxy.auth import ANONYMOUS, LOCAL, Caller
from proxy.errors import ErrorReply
from proxy.trace_context import TraceContext

LOOKUP_STAGES = ("prefix", "fingerprint", "embedding", "plan", "fetch")


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
class AdmissionRecord:
    """Who sent a request, and why it got no answer."""

    caller: Caller = ANONYMOUS
    is_counted: bool = False  # by the limits of its tenant, and in what it has used
    failure: RequestFailure | None = None  # what its handler raised


@dataclass(slots=True)
class BodyRecord:
    """The results of reading the body: whose space it names, and which rules changed it."""

    divided_owner: Owner | None = None  # the caller's owner, divided by the body's `cache_salt`
    rules: tuple[str, ...] = ()  # those that rewrote it


@dataclass(slots=True)
class PreparationRecord:
    """The request as it is prepared for the engine: its mode and its times so far."""

    mode: SharingMode | None = None  # None: nothing was generated
    body_s: float | None = None  # until a relay has read it
    tokenize_s: float | None = None
    stage_seconds: dict[str, float] = field(default_factory=dict)  # in a relay, of what follows
    unplanned: Reason | None = None  # why nothing could be planned for it
    executed: Callable[[], Mapping[str, Any]] = dict  # what the engine reports in addition to the plan

    @property
    def stages(self) -> dict[str, float]:
        read = {"body": self.body_s, "tokenize": self.tokenize_s}
        return {**{name: value for name, value in read.items() if value is not None}, **self.stage_seconds}


@dataclass(slots=True)
class AnswerRecord:
    """The outcome of a request: its plans, its times, its end."""

    reports: dict[int, SharingReport] = field(default_factory=dict)  # by the number of the prompt
    finished: dict[int, Finished] = field(default_factory=dict)  # the same, of those that have ended
    first_token_s: float | None = None  # since the request came in
    token_gaps_s: list[float] = field(default_factory=list)
    ended_as: str = ""  # OpenAI's finish reason, or "error" for a stream that broke off
    broken_off: RequestFailure | None = None  # why the answer is an error, or ends with one
    disconnected: bool = False

    @property
    def total(self) -> SharingReport:
        return merged(self.reports.values())

    @property
    def num_completion_tokens(self) -> int | None:
        """Return the number of generated tokens; None for a relayed answer, which is not counted here."""
        if not self.finished:
            return None
        return sum(finished.num_completion_tokens for finished in self.finished.values())


@dataclass(frozen=True, slots=True, eq=False)
class RequestRecord:
    """One request. Its parts are filled in as it goes on, and read when it is over."""

    request_id: str  # the client's, if it gave one
    unique_id: str  # ours: no other request has it
    trace: TraceContext | None = None  # of its own span, or without tracing of the client's
    started: float = field(default_factory=perf_counter)
    admission: AdmissionRecord = field(default_factory=AdmissionRecord)
    body: BodyRecord = field(default_factory=BodyRecord)
    preparation: PreparationRecord = field(default_factory=PreparationRecord)
    answer: AnswerRecord = field(default_factory=AnswerRecord)

    @property
    def owner(self) -> Owner:
        return self.body.divided_owner or self.admission.caller.owner

    @property
    def duration_s(self) -> float:
        return perf_counter() - self.started

    @property
    def lookup_s(self) -> float:
        """Seconds to find the plan, and to read the KV for it."""
        stages = self.preparation.stages
        ended = [finished.stage_seconds for finished in self.answer.finished.values()]
        return sum(times.get(stage, 0.0) for times in (stages, *ended) for stage in LOOKUP_STAGES)

    @property
    def reason(self) -> Reason | None:
        """Return why not more was shared; of several prompts the first reason."""
        return self.answer.total.reason if self.answer.reports else self.preparation.unplanned

    @property
    def failure(self) -> RequestFailure | None:
        return self.admission.failure or self.answer.broken_off


RECORD: web.RequestKey[RequestRecord] = web.RequestKey("record", RequestRecord)


def client_of(request: web.Request) -> str:
    """Return the name of the request's key, with the client's address where there are no keys."""
    caller = request[RECORD].admission.caller
    return f"{caller.name} {request.remote}" if caller is LOCAL else caller.name


def merged(reports: Iterable[SharingReport]) -> SharingReport:
    """
    One report of all prompts of a request, without donors.

    Its counts and seconds are the sums. Its decision is that of the prompt that shares most boldly: `approx`,
    else `exact`, else `full`. Its reason is the first that a prompt has. Its prediction is the worst of the
    approximate plans; if there is none, the worst of those that were refused.
    """
    reports = list(reports)
    if len(reports) == 1:  # nearly every request has one prompt, and asks for this several times
        return replace(reports[0], donors=(), first_difference=None)
    decisions = {report.decision for report in reports}
    return SharingReport(
        num_exact=sum(report.num_exact for report in reports),
        num_copied=sum(report.num_copied for report in reports),
        num_recomputed=sum(report.num_recomputed for report in reports),
        num_repaired=sum(report.num_repaired for report in reports),
        decision=next((decision for decision in Decision if decision in decisions), Decision.FULL),
        reason=next((report.reason for report in reports if report.reason is not None), None),
        prediction=_worst_prediction(reports),
        saved_s=sum(report.saved_s for report in reports),
    )


def _worst_prediction(reports: Iterable[SharingReport]) -> Prediction | None:
    predicted = [report for report in reports if report.prediction is not None]
    approximate = [report for report in predicted if report.decision is Decision.APPROX]
    predictions = [report.prediction for report in approximate or predicted if report.prediction is not None]
    return max(predictions, key=lambda prediction: prediction.expected, default=None)


def _loggable(exc: Exception, text: str) -> str:
    """A reply's text without the client's own words, on one line."""
    for quoted in exc.quoted if isinstance(exc, RequestError) else ():
        text = text.replace(quoted, "…") if quoted else text
    return "".join(letter if letter.isprintable() else " " for letter in text)
