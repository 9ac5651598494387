"""
API key -> caller: which KV a request may share, and whether it may use the operator's routes. And which web
pages of other origins may use this server: those of `server.cors_origins`.

Only hashes of keys are known here. Identity comes from the key and from nothing in the body.

A browser asks first, by a preflight, and lets a page read an answer only if that allows its origin. Those of
operators' routes never do: a page in an operator's browser must not reach them.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from aiohttp import web

from kvshare.errors import ConfigError, ErrorCode
from kvshare.loopback import is_loopback
from kvshare.namespace import Owner
from kvshare.settings import KeySettings
from kvshare.tenants import named, owner_of_key
from proxy.errors import HttpError, forbidden

ANY_ORIGIN = "*"
_METHODS = "GET, POST, PUT, PATCH, DELETE"
_REQUESTED = re.compile(r"[A-Za-z0-9!#$&'*+.^_`|~, -]{1,2048}")  # field names with commas
_EXPOSED = ", ".join(
    [
        *("X-Request-Id", "Request-Id", "traceresponse", "Retry-After", "retry-after-ms"),
        *(f"x-ratelimit-{part}-requests" for part in ("limit", "remaining", "reset")),
        *(f"anthropic-ratelimit-requests-{part}" for part in ("limit", "remaining", "reset")),
        *("X-KVShare-Request", "X-KVShare-Decision", "X-KVShare-Plan", "X-KVShare-Reason", "X-KVShare-Rules"),
    ]
)
_MAX_AGE_S = "600"  # browsers cap it; without it each request costs two


@dataclass(frozen=True, slots=True)
class Caller:
    """The key's name (for logs) and the identity under which its KV is stored."""

    name: str
    owner: Owner
    is_admin: bool = False  # an admin may also infer

    @property
    def tenant(self) -> str:
        return named(self.owner).tenant


LOCAL = Caller("local", Owner("local", "tenant"))
ANONYMOUS = Caller("-", Owner("", ""))  # routes that ask for no key
_OF_OPERATORS = ("/admin", "/metrics")  # and what is below them


class Keyring:
    """The configured keys. Without any there is one local caller, and admins are loopback peers."""

    def __init__(self, keys: Sequence[KeySettings]) -> None:
        """Raises ConfigError if two keys have one name or one hash: they would be one."""
        for field in ("name", "sha256"):
            values = [getattr(key, field) for key in keys]
            if len(set(values)) != len(values):
                raise ConfigError("auth.keys", f"two keys have the same {field}")
        self._keys: dict[Owner, list[KeySettings]] = {}
        for key in keys:
            self._keys.setdefault(owner_of(key), []).append(key)
        self._callers = [(key.sha256, Caller(key.name, owner_of(key), key.role == "admin")) for key in keys]

    @property
    def is_open(self) -> bool:
        return not self._callers

    def caller_of(self, request: web.Request) -> Caller:
        """Return the caller whose key a request has. Raises HttpError 401 for an unknown key, or none."""
        if self.is_open:
            return LOCAL
        key = _presented_key(request)
        digest = hashlib.sha256(key).hexdigest()
        # Each hash is compared, so that timing does not reveal which one was close.
        callers = [caller for known, caller in self._callers if hmac.compare_digest(known, digest)]
        if not key or not callers:
            message = (
                "Incorrect or missing API key. Send it as 'Authorization: Bearer <key>' "
                "or as 'x-api-key: <key>'."
            )
            raise HttpError(401, ErrorCode.INVALID_API_KEY, message, {"WWW-Authenticate": "Bearer"})
        return callers[0]

    def owners(self) -> Iterator[Owner]:
        if self.is_open:
            yield LOCAL.owner
        yield from self._keys

    def tenants(self) -> list[str]:
        return list(dict.fromkeys(named(owner).tenant for owner in self.owners()))

    def names_of(self, tenant: str, scope: str, key: str | None) -> list[str]:
        """The names of the keys whose requests have this owner; `key`: of a private one."""
        owner = owner_of_key(tenant, scope, key or "")
        return [key.name for key in self._keys.get(owner, [])]

    def owner_named(self, tenant: str | None, key: str | None) -> Owner | None:
        """The owner of a key's requests, or of what a tenant's keys share; None if there is no such owner."""
        keys = (entry for entries in self._keys.values() for entry in entries)
        if key is not None:
            owners = (
                owner_of(entry) for entry in keys if entry.name == key and tenant in (None, entry.tenant)
            )
            return next(owners, None)
        if tenant not in self.tenants():
            return None
        return owner_of_key(str(tenant), "tenant", "")

    def check_admin(self, request: web.Request, caller: Caller) -> None:
        """Raises HttpError 403 if `caller`, who sent `request`, may only infer."""
        if self.is_open and not is_local(request):
            raise forbidden("Without API keys, admin routes answer loopback clients only.")
        if not self.is_open and not caller.is_admin:
            raise forbidden("This API key may not use admin routes.")


def owner_of(key: KeySettings) -> Owner:
    """All keys of a tenant have one owner; a private key has its own."""
    return owner_of_key(key.tenant, key.scope, key.name)


def _presented_key(request: web.Request) -> bytes:
    """OpenAI's clients send it as a bearer, Anthropic's as `x-api-key`, Azure's as `api-key`. Else empty."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        key = request.headers.get("X-Api-Key") or request.headers.get("Api-Key") or ""
    key = key.strip()
    return key.encode("utf-8", "surrogateescape")  # aiohttp decoded it so


def is_for_operators(path: str) -> bool:
    """Return whether a route is closed to keys of the role `infer`."""
    return any(path == each or path.startswith(f"{each}/") for each in _OF_OPERATORS)


def is_local(request: web.Request) -> bool:
    """
    Return whether the request comes from a program on this machine, on its own behalf.

    A web page in the user's browser (Origin, Sec-Fetch-Site, a foreign Host) and what a reverse proxy on this
    machine forwards come from a loopback address too. They are not local, but a proxy is known by headers
    only: the operator of one that sets none configures keys. A page of this server itself is local: the only
    one with scripts is the dashboard.
    """
    forwarded = ("Forwarded", "X-Forwarded-For", "X-Real-IP")
    if any(header in request.headers for header in forwarded) or _is_of_foreign_page(request):
        return False
    try:
        host = request.url.host
    except ValueError:  # the header Host is not the name of a host
        return False
    return is_loopback(request.remote or "") and is_loopback(host or "")


def _is_of_foreign_page(request: web.Request) -> bool:
    """Return whether a browser sent the request for another server's page. Pages cannot set these headers."""
    site, origin = request.headers.get("Sec-Fetch-Site"), request.headers.get("Origin")
    if site is None and origin is None:
        return False
    return site != "same-origin" or origin not in (None, f"{request.scheme}://{request.host}")


def preflight(request: web.Request, origins: Sequence[str]) -> web.Response | None:
    """
    Answer a browser that asks if a page may send something, with the headers that `add_cors_headers` lacks.

    Raises:  HttpError 403 for other origins
    """
    asks = "Origin" in request.headers and "Access-Control-Request-Method" in request.headers
    if request.method != "OPTIONS" or not asks:
        return None
    if not _is_allowed(request, origins):
        raise forbidden(
            "Pages of this origin may not call this route: expected one of server.cors_origins, and no "
            "operators' route. See docs/operating.md."
        )
    headers = {"Access-Control-Allow-Methods": _METHODS, "Access-Control-Max-Age": _MAX_AGE_S}
    # Clients add headers of their own (x-stainless-...), and "*" would not cover Authorization: an allowed
    # origin may send all headers that the browser lists.
    requested = request.headers.get("Access-Control-Request-Headers", "")
    if _REQUESTED.fullmatch(requested):
        headers["Access-Control-Allow-Headers"] = requested
    return web.Response(status=204, headers=headers)


def add_cors_headers(request: web.Request, response: web.StreamResponse, origins: Sequence[str]) -> None:
    """Let a page of an allowed origin read an answer. Cookies and the like only for origins by name."""
    if not origins:
        return
    headers = response.headers
    if ANY_ORIGIN not in origins:
        headers.add("Vary", "Origin")  # a cache must not answer one origin with what another may read
    if _is_allowed(request, origins):
        by_name = ANY_ORIGIN not in origins
        headers["Access-Control-Allow-Origin"] = request.headers["Origin"] if by_name else ANY_ORIGIN
        headers["Access-Control-Expose-Headers"] = _EXPOSED
        if by_name:
            headers["Access-Control-Allow-Credentials"] = "true"


def _is_allowed(request: web.Request, origins: Sequence[str]) -> bool:
    origin, path = request.headers.get("Origin"), request.path
    return origin is not None and not is_for_operators(path) and (ANY_ORIGIN in origins or origin in origins)
