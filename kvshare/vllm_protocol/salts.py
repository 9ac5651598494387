"""
Values of vLLM's `cache_salt`: requests with different salts never share blocks of vLLM's own prefix cache.
"""

from __future__ import annotations

import hashlib

from kvshare.namespace import Owner

_DOMAIN = b"kvshare.cache_salt.v1"


def owner_salt(owner: Owner, client_salt: str | None = None) -> str:
    """
    The salt of an owner's requests: vLLM's own prefix cache never crosses owners.

    A client's salt divides its own space further; it cannot name another's.
    """
    digest = hashlib.sha256(_DOMAIN)
    for value in (owner.tenant, owner.scope, client_salt or ""):
        raw = value.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "big"))
        digest.update(raw)
    return digest.hexdigest()


def private_salt(request_id: str) -> str:
    """The salt of a request whose KV is approximate: no other request ever has it."""
    return f"kvshare-private-{request_id}"
