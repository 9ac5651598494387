"""
Reads a request body: JSON, then the operator's rules, then a checked model; and what the request says about
sharing. Errors say what is wrong. For both engines.

No error quotes the body.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from aiohttp import web
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from kvshare.errors import ErrorCode, RequestError
from kvshare.namespace import Owner
from kvshare.requests import SharingMode
from kvshare.rules.rewrite import apply_rules
from kvshare.rules.texts import shape_of
from kvshare.tenants import named
from proxy.azure import openai_url, with_deployment
from proxy.cache_salt import divided
from proxy.connection import send_continue
from proxy.content_encoding import codings_of, decoded
from proxy.context import SERVER
from proxy.errors import HttpError, too_large
from proxy.json_text import parse_object
from proxy.request_record import RECORD
from proxy.wrong_values import invalid, to_request_error, unknown_key, wrong

_Model = TypeVar("_Model", bound=BaseModel)

BODY_TIMEOUT_S = 60.0  # a client that trickles its body holds a connection no longer than this
MAX_KEYS = 16  # of the `kvshare` object, unknown ones included
_BODY: web.RequestKey[bytes] = web.RequestKey("body", bytes)  # read and decoded
_LARGE_BODY = 256 * 1024  # bytes; larger ones are read and rewritten off the event loop
_EXPLAIN = "/admin/explain"
_APIS = {  # that /admin/explain takes requests of
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}


async def read_object(request: web.Request) -> dict[str, Any]:
    """
    The body as a JSON object, as the operator's rules leave it. The request's record names those that acted,
    and has the owner that the body's `cache_salt` leaves. A model that the path names replaces the body's.

    No rule acts where the route takes no prompt, or where the body says `"kvshare": {"rules": false}`.
    Raises:  HttpError 408, 413 and 415, RequestError
    """
    check_is_json(request)
    raw = await read_raw(request)
    is_large = len(raw) > _LARGE_BODY
    body = await asyncio.to_thread(parse_object, raw) if is_large else parse_object(raw)
    body = with_deployment(request, body)
    record = request[RECORD]
    record.body.divided_owner = divided(_asked_owner(request), body)
    rules, shape, options = request.app[SERVER].rules, shape_of(api_of(request)), body.get("kvshare")
    # What is wrong about a `kvshare` object is reported where it is read.
    is_opted_out = isinstance(options, Mapping) and options.get("rules") is False
    if not rules or shape is None or is_opted_out:
        return body
    if is_large:
        rewritten = await asyncio.to_thread(apply_rules, rules, body, shape)
    else:
        rewritten = apply_rules(rules, body, shape)
    record.body.rules = rewritten.rules
    return rewritten.body


def _asked_owner(request: web.Request) -> Owner:
    """
    Return the owner of the request's KV: the caller, or for `/admin/explain` another owner by its name.

    Raises:  RequestError for a tenant or a key that is not configured
    """
    tenant, key = request.query.get("tenant"), request.query.get("key")
    if request.path.rstrip("/") != _EXPLAIN or (tenant is None and key is None):
        return request[RECORD].admission.caller.owner
    owner = request.app[SERVER].keyring.owner_named(tenant, key)
    if owner is None:
        param = "tenant" if key is None else "key"
        raise invalid(param, f"expected the name of a {param} of auth.keys")
    return owner


def explained(request: web.Request, document: Mapping[str, Any]) -> web.Response:
    """The answer of `/admin/explain`: a plan, the tenant or private key it was made for, and the rules."""
    owner, rules = named(request[RECORD].owner), request[RECORD].body.rules
    whom = {"tenant": owner.tenant, "key": owner.key}
    return web.json_response({**document, "planned_for": whom, "rules": rules})


def check_is_json(request: web.Request) -> None:
    """
    Raises HttpError 415 for another content type.

    That keeps web pages out: a browser sends JSON across origins only after a preflight, which this server
    grants to the origins of `server.cors_origins` alone.
    """
    if request.content_type != "application/json":
        given = request.headers.get("Content-Type", "").partition(";")[0].strip()
        found = f"not '{given[:40]}'" if given else "the header is missing"
        message = f"Send the body with 'Content-Type: application/json', {found}."
        raise HttpError(415, ErrorCode.UNSUPPORTED_MEDIA_TYPE, message)


async def read_raw(request: web.Request) -> bytes:
    """
    The body's bytes, without their `Content-Encoding`. A client that waits for `100 Continue` gets it here.

    Raises:  HttpError 408 if they do not come in time, 413 and 415; RequestError if they do not come whole
    """
    if _BODY in request:
        return request[_BODY]
    codings, max_bytes = codings_of(request.headers), request.app[SERVER].settings.server.max_body_bytes
    if (request.content_length or 0) > max_bytes:
        raise too_large(max_bytes)
    await send_continue(request)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            raw = await request.read()
    except TimeoutError:
        message = f"The request body did not arrive within {BODY_TIMEOUT_S:g} s."
        raise HttpError(408, ErrorCode.REQUEST_TIMEOUT, message) from None
    except web.HTTPRequestEntityTooLarge:
        raise too_large(max_bytes) from None
    except web.RequestPayloadError as exc:
        raise RequestError(f"The request body did not arrive whole: {exc}.") from None
    request[_BODY] = await decoded(raw, codings, max_bytes=max_bytes)
    return request[_BODY]


def api_of(request: web.Request) -> str:
    """
    The path of the API that a request's body follows. For /admin/explain the argument `api` names it.

    Raises:  RequestError for another `api`
    """
    path = openai_url(request).path.rstrip("/")
    if path != _EXPLAIN:
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
        raise to_request_error(exc, document) from None


class KVShareObject(BaseModel):
    """The `kvshare` object of a body: how much of other prompts it accepts, and whether it is stored."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    mode: Literal["off", "exact", "approx"] | None = None  # None: the request leaves it to the settings
    max_deviation: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None  # nats
    no_store: bool | None = None
    rules: bool | None = None  # whether the operator's rules act on it; `read_object` looks first

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, value: Any) -> Any:
        """Raises RequestError for a key that is not understood; it says which are."""
        for name in value if isinstance(value, dict) else ():
            if name not in cls.model_fields:
                raise unknown_key(f"kvshare.{name}", cls.model_fields)
        return value


KVShareField = Annotated[KVShareObject, at_most(MAX_KEYS)] | None


class _Body(BaseModel):
    """The only part of a relayed body that is the proxy's own."""

    model_config = ConfigDict(extra="ignore", strict=True)

    kvshare: KVShareField = None


def parse_kvshare(document: Mapping[str, Any]) -> KVShareObject | None:
    """The `kvshare` object of a relayed body. Raises RequestError."""
    return validated(_Body, document).kvshare


def is_controlled(given: KVShareObject | None) -> bool:
    """Return whether the controller may serve a request unshared: not if the request asks to be stored."""
    return given is None or given.no_store is not False


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The way a request may be shared, and whether its prompt may be stored."""

    mode: SharingMode
    may_store: bool
    max_deviation: float | None = None  # nats; counts where it is below that of the settings


def request_options(request: web.Request, asked: KVShareObject | None) -> RequestOptions:
    """
    The options of `request`, whose body has `asked`.

    Body and header decide together, the stricter wins: `no-cache` shares nothing, `no-store` stores nothing.
    No request gets more than `sharing.max_mode` and the `max_mode` of its tenant.
    """
    asked = asked or KVShareObject()
    headers = request.headers.getall("Cache-Control", [])
    directives = {directive.strip().lower() for header in headers for directive in header.split(",")}
    sharing, access = request.app[SERVER].settings.sharing, request.app[SERVER].live.access
    of_tenant = access.limits_of(named(request[RECORD].owner).tenant).max_mode
    mode = SharingMode.least(asked.mode or sharing.mode, sharing.max_mode, of_tenant)
    may_store = not asked.no_store and "no-store" not in directives
    mode = SharingMode.OFF if "no-cache" in directives else mode
    return RequestOptions(mode, may_store, asked.max_deviation)
