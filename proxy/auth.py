"""
API key -> caller: which KV a request may share, and whether it may use the operator's routes.

Only hashes of keys are known here. Identity comes from the key and from nothing in the body.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from aiohttp import web

from kvshare.errors import ConfigError, ErrorCode
from kvshare.loopback import is_loopback
from kvshare.namespace import Owner
from kvshare.settings import KeySettings
from proxy.errors import HttpError, forbidden


class Role(StrEnum):
    INFER = "infer"
    ADMIN = "admin"  # may also infer


@dataclass(frozen=True, slots=True)
class Caller:
    """The key's name (for logs) and the identity under which its KV is stored."""

    name: str
    owner: Owner
    role: Role = Role.INFER


LOCAL = Caller("local", Owner("local", "tenant"))
ANONYMOUS = Caller("-", Owner("", ""))  # routes that ask for no key


class Keyring:
    """The configured keys. Without any there is one local caller, and admins are loopback peers."""

    def __init__(self, keys: Sequence[KeySettings]) -> None:
        """Raises ConfigError if two keys have one name or one hash: they would be one."""
        for field in ("name", "sha256"):
            values = [getattr(key, field) for key in keys]
            if len(set(values)) != len(values):
                raise ConfigError("auth.keys", f"two keys have the same {field}")
        self._callers = [(key.sha256, Caller(key.name, owner_of(key), Role(key.role))) for key in keys]

    @property
    def is_open(self) -> bool:
        return not self._callers

    def caller_of(self, request: web.Request) -> Caller:
        """Whose key a request has. Raises HttpError 401 for an unknown key, or none."""
        if self.is_open:
            return LOCAL
        key = _presented_key(request)
        caller = self._find(key) if key else None
        if caller is None:
            message = (
                "Incorrect or missing API key. Send it as 'Authorization: Bearer <key>' "
                "or as 'x-api-key: <key>'."
            )
            raise HttpError(401, ErrorCode.INVALID_API_KEY, message, {"WWW-Authenticate": "Bearer"})
        return caller

    def check_role(self, request: web.Request, caller: Caller, role: Role) -> None:
        """Raises HttpError 403 if the role of `caller`, who sent `request`, is not enough."""
        if role is not Role.ADMIN:
            return
        if self.is_open and not is_local(request):
            raise forbidden("Without API keys, admin routes answer loopback clients only.")
        if not self.is_open and caller.role is not Role.ADMIN:
            raise forbidden("This API key may not use admin routes.")

    def _find(self, key: bytes) -> Caller | None:
        """Compares with every hash, so that timing does not reveal which one was close."""
        digest = hashlib.sha256(key).hexdigest()
        found = [caller for known, caller in self._callers if hmac.compare_digest(known, digest)]
        return found[0] if found else None


def owner_of(key: KeySettings) -> Owner:
    """All keys of a tenant have one owner; a private key has its own, which no other names give."""
    if key.scope == "private":
        return Owner(json.dumps([key.tenant, key.name]), key.scope)
    return Owner(key.tenant, key.scope)


def _presented_key(request: web.Request) -> bytes:
    """OpenAI's clients send it as a bearer, Anthropic's as `x-api-key`. Empty if there is none."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    key = key.strip() if scheme.lower() == "bearer" else request.headers.get("X-Api-Key", "").strip()
    return key.encode("utf-8", "surrogateescape")  # aiohttp decoded it so


def is_local(request: web.Request) -> bool:
    """
    Whether the request comes from a program on this machine, on its own behalf.

    A web page in the user's browser (Origin, Sec-Fetch-Site, a foreign Host) and what a reverse proxy
    on this machine forwards come from a loopback address too; they are not local.
    """
    foreign = ("Origin", "Sec-Fetch-Site", "Forwarded", "X-Forwarded-For", "X-Real-IP")
    if any(header in request.headers for header in foreign):
        return False
    return is_loopback(request.remote or "") and is_loopback(request.url.host or "")
