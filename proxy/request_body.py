"""
A request body -> a JSON object -> a checked model, or an error that says what is wrong with it.

No error quotes the body.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from aiohttp import web
from pydantic import BaseModel, BeforeValidator, ValidationError

from kvshare.errors import ErrorCode, RequestError
from proxy.errors import HttpError
from proxy.prompt_rules import behind_rules
from proxy.wrong_values import to_request_error, wrong

_Body = TypeVar("_Body", bound=BaseModel)

BODY_TIMEOUT_S = 60.0  # a client that trickles its body holds a connection no longer than this


async def read_object(request: web.Request) -> dict[str, Any]:
    """The body as a JSON object, behind the operator's rules. Raises HttpError 408 and 415, RequestError."""
    check_is_json(request)
    return await behind_rules(request, parse_object(await read_raw(request)))


def check_is_json(request: web.Request) -> None:
    """
    Raises HttpError 415 for another content type.

    That keeps web pages out: a browser sends JSON across origins only after a preflight, which this server
    grants to the origins of `server.cors_origins` alone.
    """
    if request.content_type != "application/json":
        found = (
            f"not '{request.content_type[:40]}'" if "Content-Type" in request.headers else "not without it"
        )
        message = f"Send the body with 'Content-Type: application/json', {found}."
        raise HttpError(415, ErrorCode.UNSUPPORTED_MEDIA_TYPE, message)


async def read_raw(request: web.Request) -> bytes:
    """The body's bytes. Raises HttpError 408 if they do not come in time."""
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.read()
    except TimeoutError:
        message = f"The request body did not arrive within {BODY_TIMEOUT_S:g} s."
        raise HttpError(408, ErrorCode.REQUEST_TIMEOUT, message) from None


def parse_object(raw: bytes, *, strict: bool = True) -> dict[str, Any]:
    """
    JSON in UTF-8, without nesting that exhausts the parser; a name that comes twice has its last value.

    `strict`: no NaN, no Infinity, no lone surrogates either.
    """
    try:
        text = raw.decode("utf-8")
        document = json.loads(text, parse_constant=_refuse_constant if strict else None)
        if strict:
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


def at_most(limit: int) -> BeforeValidator:
    """Counts before it looks: a body of megabytes of wrong entries must not keep the loop busy."""

    def check(entries: object) -> object:
        if isinstance(entries, list | dict) and len(entries) > limit:
            raise wrong(f"at most {limit} entries", entries)
        return entries

    return BeforeValidator(check)


def validated(model: type[_Body], document: Mapping[str, Any]) -> _Body:
    """`document` as a `model`. Raises RequestError that names the first wrong parameter."""
    try:
        return model.model_validate(document)
    except ValidationError as exc:
        raise to_request_error(exc, model, document) from None
