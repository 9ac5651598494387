"""A request body -> a JSON object, or an error that says what is wrong with it. Never quotes it."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn

from aiohttp import web

from kvshare.errors import RequestError
from proxy.errors import body_timed_out, wrong_content_type

BODY_TIMEOUT_S = 60.0  # a client that trickles its body holds a connection no longer than this


async def read_object(request: web.Request) -> dict[str, Any]:
    """
    The body as a JSON object.

    Asking for the JSON content type keeps web pages out: a browser sends it across origins only after a
    preflight, which this server does not answer.
    """
    if request.content_type != "application/json":
        raise wrong_content_type()
    return parse_object(await read_raw(request))


async def read_raw(request: web.Request) -> bytes:
    """The body's bytes. Raises HttpError 408 if they do not come in time."""
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.read()
    except TimeoutError:
        raise body_timed_out(BODY_TIMEOUT_S) from None


def parse_object(raw: bytes) -> dict[str, Any]:
    """Strict JSON in UTF-8: no NaN, no Infinity, no lone surrogates, no nesting that exhausts the parser."""
    try:
        document = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
        _check_unicode(raw, document)
    except RecursionError:
        raise RequestError("The JSON body is nested too deeply.") from None
    except UnicodeDecodeError as exc:
        raise RequestError(f"The body is not UTF-8: byte {exc.start} cannot be decoded.") from None
    except json.JSONDecodeError as exc:
        raise RequestError(f"The body is not JSON: {exc.msg} at character {exc.pos}.") from None
    except ValueError:  # an integer of thousands of digits
        raise RequestError("The JSON body holds a number that cannot be represented.") from None
    if not isinstance(document, dict):
        raise RequestError("The JSON body must be an object.")
    return document


def _check_unicode(raw: bytes, document: object) -> None:
    """JSON can escape half of a surrogate pair, which no tokenizer takes. UTF-8 itself cannot hold one."""
    if b"\\ud" not in raw and b"\\uD" not in raw:
        return
    try:
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RequestError("The JSON body holds a lone surrogate, which is no Unicode text.") from None


def _refuse_constant(name: str) -> NoReturn:
    raise RequestError(f"The body is not JSON: {name} is no number.")
