"""
Values of vLLM's `cache_salt`: requests with different salts never share blocks of vLLM's own prefix cache.
"""

from __future__ import annotations

import hashlib

from kvshare.namespace import Owner

_DOMAIN = b"kvshare.cache_salt.v1"


def owner_salt(owner: Owner, client_salt: str | None = None) -> str:
    """
    The salt of an owner's requests, so that vLLM's own prefix cache is never shared between owners.

    A client's own salt divides its owner's cache further; it cannot select another owner's.
    """
    digest = hashlib.sha256(_DOMAIN)
    for value in (owner.tenant, owner.scope, client_salt or ""):
        raw = value.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "big"))
        digest.update(raw)
    return digest.hexdigest()


def private_salt(ticket_id: str) -> str:
    """The unique salt of a request with approximate KV."""
    return f"kvshare-private-{ticket_id}"
