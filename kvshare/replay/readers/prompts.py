"""
Prompts with lengths, as load tools take them: vLLM's custom data set, guidellm, AIBrix.

    vLLM     {"prompt": ..., "output_tokens": ...}
    guidellm {"prompt": ..., "prompt_tokens_count": ..., "output_tokens_count": ...}
    AIBrix   {"timestamp": ms, "requests": [{"prompt", "prompt_length", "output_length", "session_id"}]}, and
             flat rows with "timestamp_ms", "prompt_tokens", "output_tokens"

The logged lengths were counted by somebody else's tokenizer: only that of the answer is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvshare.replay.readers import fields, plain
from kvshare.replay.readers.row import LoggedRow, Place
from kvshare.replay.readers.unreadable import Reason, RowError
from kvshare.replay.requests import LoggedRequest

_ANSWER_LENGTHS = ("output_tokens_count", "output_tokens", "output_length", "completion_tokens")
_PROMPT_LENGTHS = ("prompt_tokens_count", "prompt_tokens", "prompt_length", "prompt_len")


def matches(row: Mapping[str, Any]) -> bool:
    if isinstance(row.get("requests"), list):
        return True
    return "prompt" in row and any(name in row for name in (*_ANSWER_LENGTHS, *_PROMPT_LENGTHS))


def convert(row: Mapping[str, Any], place: Place) -> Iterator[LoggedRow | Reason]:
    requests = row.get("requests")
    if requests is None:
        yield _row(row, place, place.name, _time_s(row))
        return
    if not isinstance(requests, list):
        raise RowError(Reason.WRONG_TYPE)
    if not requests:
        raise RowError(Reason.EMPTY)
    milliseconds = row.get("timestamp")  # AIBrix's own files count from 0, in milliseconds
    time_s = None if milliseconds is None else fields.seconds(milliseconds) / 1e3
    for number, request in enumerate(requests):
        try:
            yield _row(request, place, f"{place.name}.{number}", time_s)
        except RowError as exc:
            yield exc.reason


def _row(row: object, place: Place, own_name: str, time_s: float | None) -> LoggedRow:
    if not isinstance(row, Mapping):
        raise RowError(Reason.WRONG_TYPE)
    conversation = fields.optional_id(row, "session_id", "conversation")
    return LoggedRow(
        LoggedRequest(
            source=place.source,
            line=place.line,
            conversation=conversation or own_name,
            turn=0,
            user=fields.optional_id(row, "user"),
            time_s=time_s,
            prompt=plain.full(fields.text(row.get("prompt"))),
            answer=fields.optional_text(row, "completion", "answer"),
            num_answer_tokens=fields.optional_count(row, *_ANSWER_LENGTHS),
            language=fields.optional_text(row, "language", "lang") or "unknown",
        ),
        turn_by_order=conversation is not None,
    )


def _time_s(row: Mapping[str, Any]) -> float | None:
    milliseconds = row.get("timestamp_ms")
    if milliseconds is not None:
        return fields.seconds(milliseconds) / 1e3
    return fields.time_s(row.get("timestamp"))
