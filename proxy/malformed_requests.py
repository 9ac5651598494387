"""
What a client reads whose bytes are not an HTTP request: which fault they have, without the bytes.

The faults are known by the words of aiohttp's parser, which `malformed_requests.yaml` lists.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from aiohttp.http_exceptions import InvalidHeader, InvalidURLError, LineTooLong

from kvshare.errors import ErrorCode
from kvshare.tables import read_table
from proxy.errors import ErrorReply

MAX_FIELD = 8190  # bytes of a header
MAX_LINE = MAX_FIELD + 1  # of the request line; not the same, so that errors say which of both it was

# What aiohttp's parser says -> what the client reads.
_FAULTS: Mapping[str, str] = {
    reason: fault
    for fault, reasons in read_table(Path(__file__).with_suffix(".yaml")).items()
    for reason in reasons
}
_DUPLICATE = re.compile(r"Duplicate '([\w-]+)' header found\.")


def refusal_of(exc: BaseException | None, message: str) -> ErrorReply:
    """The reply to a client whose bytes are not a request."""
    if isinstance(exc, LineTooLong):
        is_line = exc.args[1] == MAX_LINE
        text = f"The request's line is too long: expected at most {MAX_LINE} bytes."
        if not is_line:
            text = f"A header of the request is too long: expected at most {MAX_FIELD} bytes."
        return ErrorReply(414 if is_line else 431, ErrorCode.REQUEST_TOO_LARGE, text)
    if message.startswith("Too many headers"):
        text = "The request has too many headers: expected at most 128."
        return ErrorReply(431, ErrorCode.REQUEST_TOO_LARGE, text)
    return ErrorReply(400, ErrorCode.BAD_REQUEST, f"This is not an HTTP request: {fault_of(exc, message)}.")


def fault_of(exc: BaseException | None, message: str) -> str:
    """Name the fault of the bytes, without quoting them."""
    if duplicate := _DUPLICATE.fullmatch(message):
        return f"it has two {duplicate[1]} headers"
    if isinstance(exc, LineTooLong):
        return "a line or header is too long"
    if isinstance(exc, InvalidHeader):
        return "a header has a name or a character that it may not have"
    if "HTTPS traffic" in message:
        return "it is TLS, and this port speaks plain HTTP"
    reason = message.removeprefix("Bad status line:\n  ").partition(":\n\n")[0].strip()
    if reason in _FAULTS:
        return _FAULTS[reason]
    return "its address is not a URL" if isinstance(exc, InvalidURLError) else "expected HTTP/1.1"
