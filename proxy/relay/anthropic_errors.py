"""
vLLM's errors on the routes of Anthropic's API, in that API's shape, types and words.

On these routes vLLM 0.32 has errors of three shapes: OpenAI's for an invalid body, FastAPI's for an unknown
route, and otherwise Anthropic's, but with its own types. Errors of other routes are relayed unchanged.
"""

from __future__ import annotations

import json
import re
from typing import Any

from proxy.errors import ErrorReply
from proxy.sse import named_events

MAX_BODY = 256 * 1024  # bytes of an error that are read

_EVENT = b"event: error\n"
_END = b"\n\n"
_STATUSES = {  # by type of vLLM's error events; all other types are the server's fault
    "BadRequestError": 400,
    "Bad Request": 400,
    "NotFoundError": 404,
    "UnprocessableEntityError": 422,
    "ServiceUnavailableError": 503,
}

# How vLLM says that a prompt does not fit. `more`: the number is a lower bound.
_TOO_LONG = tuple(
    re.compile(pattern)
    for pattern in (
        r"maximum context length is (?P<limit>\d+) tokens\. However, .*?your prompt contains "
        r"(?P<more>at least )?(?P<tokens>\d+) input tokens",
        r"maximum context length is (?P<limit>\d+) tokens\. However, your prompt contains "
        r"(?P<characters>\d+) characters",
        r"prompt \(length (?P<tokens>\d+)\) .*?longer than the maximum model length of (?P<limit>\d+)",
        r"Input length \((?P<tokens>\d+)\) exceeds model's maximum context length \((?P<limit>\d+)\)",
    )
)
_REQUESTED = re.compile(
    r"maximum context length is (?P<limit>\d+) tokens\. However, you requested (?P<output>\d+) output tokens "
    r"and your prompt contains (?P<more>at least )?(?P<tokens>\d+) input tokens"
)
_OUTPUT = re.compile(r"max_tokens=(\d+) cannot be greater than max_model_len=(\d+)\.")
_VALIDATION = re.compile(
    r"""'loc': '(?P<place>[^']*)', 'msg': (?P<problem>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
)


def reply_of(status: int, raw: bytes) -> ErrorReply:
    """Translate vLLM's error `raw` for a client of Anthropic's API. The status stays."""
    _, message = _type_and_message(raw)
    return ErrorReply(status, message=_words(message) or f"The model server answered with status {status}.")


class ErrorEvents:
    """Relays a stream of Messages events. Events that report an error are rewritten; all other bytes stay."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._held = b""  # bytes that are, or may be, the beginning of an error event
        self._is_within = False  # whether an event that is not an error has begun and not ended

    def feed(self, chunk: bytes) -> bytes:
        """Return the bytes that can be sent on now."""
        held, out = self._held + chunk, b""
        while held:
            if not self._is_within and (held.startswith(_EVENT) or _EVENT.startswith(held)):
                event, end, rest = held.partition(_END)
                if not end:
                    break
                out, held = out + self._rewritten(event), rest
                continue
            event, end, rest = held.partition(_END)
            self._is_within = not end
            if not end and held.endswith(b"\n"):  # perhaps the first half of an event's end
                self._held = b"\n"
                return out + held[:-1]
            out, held = out + event + end, rest
        self._held = held
        return out

    def flush(self) -> bytes:
        held, self._held = self._held, b""
        return held

    def _rewritten(self, event: bytes) -> bytes:
        data = b"".join(line[5:] for line in event.split(b"\n") if line.startswith(b"data:"))
        kind, message = _type_and_message(data)
        reply = ErrorReply(_STATUSES.get(kind, 500), message=_words(message) or "The model server failed.")
        return named_events(reply.anthropic_body(self._request_id))


def _type_and_message(raw: bytes) -> tuple[str, str]:
    """Return type and message of an error in any of vLLM's shapes; empty if it is not one."""
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError):
        return "", ""
    error: Any = document
    if isinstance(document, dict):
        error = document.get("error", document)
    if isinstance(error, str):
        return "", error
    if not isinstance(error, dict):
        return "", ""
    message = error.get("message", error.get("detail"))
    return str(error.get("type", "")), message if isinstance(message, str) else ""


def _words(message: str) -> str:
    """Return a message in the words of Anthropic's API, if known: agents shorten prompts because of these."""
    if (match := _REQUESTED.search(message)) and int(match["tokens"]) < int(match["limit"]):
        tokens = f"{match['more'] or ''}{match['tokens']}"
        return (
            f"input length and `max_tokens` exceed context limit: {tokens} + {match['output']} > "
            f"{match['limit']}, decrease input length or `max_tokens` and try again"
        )
    if match := _OUTPUT.search(message):
        return f"max_tokens: {match[1]} > {match[2]}, which is the maximum allowed number of output tokens"
    for pattern in _TOO_LONG:
        if match := pattern.search(message):
            return _too_long(match.groupdict())
    problems = [
        f"{match['place'].removeprefix('body.')}: {match['problem'][1:-1]}"
        for match in _VALIDATION.finditer(message)
    ]
    return "; ".join(problems) or message


def _too_long(groups: dict[str, str | None]) -> str:
    limit = groups["limit"]
    if characters := groups.get("characters"):
        return f"prompt is too long: more than {limit} tokens > {limit} maximum ({characters} characters)"
    bound = groups.get("more") or ""
    return f"prompt is too long: {bound}{groups['tokens']} tokens > {limit} maximum"
