"""What is remembered of a request while it is answered, for its metrics and its line in the log. No text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

from aiohttp import web

from kvshare.engines.base import Delta, Finished, SharingMode, SharingReport
from proxy.auth import ANONYMOUS, Caller


@dataclass(slots=True)
class RequestRecord:
    """Filled in as the request goes on; read once, when it is over."""

    request_id: str
    started: float = field(default_factory=perf_counter)
    caller: Caller = ANONYMOUS
    mode: SharingMode | None = None  # None: nothing was generated
    reports: Sequence[SharingReport] = ()
    finished: Sequence[Finished] = ()
    tokenize_s: float | None = None
    first_token_s: float | None = None  # since the request came in
    token_gaps_s: list[float] = field(default_factory=list)
    finish_reason: str = ""  # OpenAI's, or "error" for a stream that broke off
    disconnected: bool = False
    _last_token: dict[int, float] = field(default_factory=dict)

    @property
    def duration_s(self) -> float:
        return perf_counter() - self.started

    @property
    def num_completion_tokens(self) -> int | None:
        """None for an answer that was relayed: nobody here counted."""
        if not self.finished:
            return None
        return sum(finished.num_completion_tokens for finished in self.finished)

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
