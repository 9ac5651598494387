"""
The answer to bytes that are not an HTTP request. It names the fault, and does not repeat the bytes.

The faults are known by the words of aiohttp's parser.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from aiohttp.http_exceptions import InvalidHeader, InvalidURLError, LineTooLong

from kvshare.errors import ErrorCode
from proxy.errors import ErrorReply

MAX_FIELD = 8190  # bytes of a header
MAX_LINE = MAX_FIELD + 1  # of the request line; not the same, so that errors say which of both it was

# What the client reads, and by which words of aiohttp's parser (3.14) it is known.
_REASONS: Mapping[str, Sequence[str]] = {
    "it is HTTP/2, and this port speaks HTTP/1.1": [
        "Pause on PRI/Upgrade",
        "Expected HTTP/2 Connection Preface",
    ],
    "it does not begin with a method of HTTP in capital letters": [
        "Invalid method encountered",
        "Invalid word encountered",
        "Invalid method for HTTP/x.x request",
        "Invalid method for RTSP/x.x request",
        "Expected SOURCE method for ICE/x.x request",
        "Expected space after method",
    ],
    "its address does not begin with a slash": [
        "Unexpected start char in url",
        "Unexpected char in url schema",
        "Unexpected char in url server",
        "Invalid characters in url",
    ],
    "its address has a character that must be written with a percent sign": [
        "Invalid char in url path",
        "Invalid char in url query",
        "Invalid char in url fragment start",
    ],
    "its first line does not end with a space and HTTP/1.1, or its address has a space": [
        "Expected HTTP/, RTSP/ or ICE/",
        "Unexpected space after start line",
    ],
    "its version is not HTTP/1.0 or HTTP/1.1": [
        "Invalid HTTP version",
        "Invalid major version",
        "Invalid minor version",
        "Expected dot",
    ],
    "a line does not end with CR LF": [
        "Expected CRLF after version",
        "Expected CRLF",
        "Expected LF after CR",
        "Expected LF after headers",
        "Missing expected CR after header value",
        "Missing expected LF after header value",
    ],
    "it has no Host header, which HTTP/1.1 requires": ["Missing 'Host' header in request."],
    "the name of a header has a character that it may not have, or a line has no colon": [
        "Invalid header token",
        "Invalid header field char",
    ],
    "the value of a header has a character that it may not have": ["Invalid header value char"],
    "the value of a header goes on in the next line": ["Unexpected whitespace after header value"],
    "it has two Content-Length headers": ["Duplicate Content-Length"],
    "it has both Content-Length and Transfer-Encoding": [
        "Content-Length can't be present with Transfer-Encoding",
        "Transfer-Encoding can't be present with Content-Length",
    ],
    "its Content-Length is not a number": ["Invalid character in Content-Length", "Empty Content-Length"],
    "its Content-Length is above 2^64": ["Content-Length overflow"],
    "its Transfer-Encoding is not chunked": [
        "Request has invalid `Transfer-Encoding`",
        "Invalid `Transfer-Encoding` header value",
    ],
    "a chunk of its body does not begin with its size in hexadecimal digits": [
        "Invalid character in chunk size",
        "Expected LF after chunk size",
        "Missing expected CR after chunk size",
    ],
    "the size of a chunk of its body is above 2^64": ["Chunk size overflow"],
    "a chunk of its body is longer than its size says": [
        "Expected LF after chunk data",
        "Missing expected CR after chunk data",
    ],
    "a chunk of its body has an extension that cannot be read": [
        "Invalid character in chunk extensions",
        "Invalid character in chunk extensions name",
        "Invalid character in chunk extensions value",
        "Invalid character in chunk extensions quoted value",
        "Invalid character in chunk extensions quote value",
        "Invalid quoted-pair in chunk extensions quoted value",
        "Missing expected CR after chunk extension name",
        "Missing expected CR after chunk extension value",
    ],
    "it comes after a request that said 'Connection: close'": ["Data after `Connection: close`"],
}
_FAULTS = {reason: fault for fault, reasons in _REASONS.items() for reason in reasons}
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
