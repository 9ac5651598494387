"""
Reads a request body: JSON, then the operator's rules, then a checked model; and what the request says about
sharing. Errors say what is wrong. For both engines.

No error quotes the body.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from aiohttp import web
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from kvshare.errors import ErrorCode, RequestError
from kvshare.requests import SharingMode
from kvshare.rules.rewrite import apply_rules, shape_of
from proxy.cache_salt import divided
from proxy.context import SERVER
from proxy.errors import HttpError
from proxy.request_log import RECORD
from proxy.wrong_values import invalid, to_request_error, wrong

_Model = TypeVar("_Model", bound=BaseModel)

BODY_TIMEOUT_S = 60.0  # a client that trickles its body holds a connection no longer than this
MAX_KEYS = 16  # of the `kvshare` object, unknown ones included
_LARGE_BODY = 256 * 1024  # bytes; rules rewrite larger ones off the event loop
_APIS = {  # that /admin/explain takes requests of
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}


async def read_object(request: web.Request, *, strict: bool = True) -> dict[str, Any]:
    """
    The body as a JSON object, as the operator's rules leave it. The request's record names those that acted,
    and has the owner that the body's `cache_salt` leaves.

    No rule acts where the route takes no prompt, or where the body says `"kvshare": {"rules": false}`.
    `strict`: as for `parse_object`.
    Raises:  HttpError 408 and 415, RequestError
    """
    check_is_json(request)
    raw = await read_raw(request)
    body = parse_object(raw, strict=strict)
    request[RECORD].divided_owner = divided(request[RECORD].caller.owner, body)
    rules, shape, options = request.app[SERVER].rules, shape_of(api_of(request)), body.get("kvshare")
    # What is wrong about a `kvshare` object is reported where it is read.
    is_opted_out = isinstance(options, Mapping) and options.get("rules") is False
    if not rules or shape is None or is_opted_out:
        return body
    if len(raw) > _LARGE_BODY:
        rewritten = await asyncio.to_thread(apply_rules, rules, body, shape)
    else:
        rewritten = apply_rules(rules, body, shape)
    request[RECORD].rules = rewritten.rules
    return rewritten.body


def check_is_json(request: web.Request) -> None:
    """
    Raises HttpError 415 for another content type.

    That keeps web pages out: a browser sends JSON across origins only after a preflight, which this server
    grants to the origins of `server.cors_origins` alone.
    """
    if request.content_type != "application/json":
        found = (
            f"not '{request.content_type[:40]}'"
            if "Content-Type" in request.headers
            else "the header is missing"
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


def api_of(request: web.Request) -> str:
    """
    The path of the API that a request's body follows. For /admin/explain the argument `api` names it.

    Raises:  RequestError for another `api`
    """
    path = request.path.rstrip("/")
    if path != "/admin/explain":
        return path
    name = request.query.get("api", "chat")
    if name not in _APIS:
        raise invalid("api", f"expected one of {', '.join(_APIS)}")
    return _APIS[name]


def at_most(limit: int) -> BeforeValidator:
    """Counts entries before it checks them: megabytes of wrong entries must not keep the loop busy."""

    def check(entries: object) -> object:
        if isinstance(entries, list | dict) and len(entries) > limit:
            raise wrong(f"at most {limit} entries", entries)
        return entries

    return BeforeValidator(check)


def validated(model: type[_Model], document: Mapping[str, Any]) -> _Model:
    """`document` as a `model`. Raises RequestError that names the first wrong parameter."""
    try:
        return model.model_validate(document)
    except ValidationError as exc:
        raise to_request_error(exc, model, document) from None


class KVShareObject(BaseModel):
    """The `kvshare` object of a body: how much of other prompts it accepts, and whether it is stored."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    mode: Literal["off", "exact", "approx"] | None = None  # None: the request leaves it to the settings
    no_store: bool | None = None
    rules: bool | None = None  # whether the operator's rules act on it; `read_object` looks first


KVShareField = Annotated[KVShareObject, at_most(MAX_KEYS)] | None


class _Body(BaseModel):
    """The only part of a relayed body that is the proxy's own."""

    model_config = ConfigDict(extra="ignore", strict=True)

    kvshare: KVShareField = None


def parse_kvshare(document: Mapping[str, Any]) -> KVShareObject | None:
    """The `kvshare` object of a relayed body. Raises RequestError."""
    return validated(_Body, document).kvshare


def request_options(request: web.Request, given: KVShareObject | None) -> tuple[SharingMode, bool]:
    """
    How `request`, whose body has `given`, may be shared, and whether its prompt may be stored.

    Body and header decide together, the stricter wins: `no-cache` shares nothing, `no-store` stores nothing.
    """
    given = given or KVShareObject()
    headers = request.headers.getall("Cache-Control", [])
    directives = {directive.strip().lower() for header in headers for directive in header.split(",")}
    mode = SharingMode(given.mode or request.app[SERVER].settings.sharing.mode)
    may_store = not given.no_store and "no-store" not in directives
    return SharingMode.OFF if "no-cache" in directives else mode, may_store
