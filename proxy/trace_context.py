"""The span that a client's `traceparent` names, and what others are given of ours: W3C Trace Context."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_HEADER = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """One span of a trace, as it is given to others. Ids are lower-case hexadecimal."""

    trace_id: str
    span_id: str
    flags: str

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> TraceContext | None:
        """The span that a request's `traceparent` names; None if there is none, or it is not valid."""
        match = _HEADER.fullmatch(headers.get("traceparent", "").strip())
        if match is None:
            return None
        version, trace_id, span_id, flags, more = match.groups()
        if version == "ff" or not int(trace_id, 16) or not int(span_id, 16) or (more and version == "00"):
            return None
        return cls(trace_id, span_id, flags)

    @property
    def header(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.flags}"
