"""
Values of vLLM's `cache_salt`: requests with different salts never share blocks of vLLM's own prefix cache.
"""

from __future__ import annotations

from kvshare.namespace import Owner, framed_digest

_DOMAIN = b"kvshare.cache_salt.v1"


def owner_salt(owner: Owner) -> str:
    """
    Return the salt of an owner's requests, so that vLLM's own prefix cache is never shared between owners.

    A client's own salt is part of the owner: it divides that cache, and cannot select another owner's.
    """
    return framed_digest(_DOMAIN, (owner.tenant, owner.scope, owner.salt))


def private_salt(ticket_id: str) -> str:
    """Return the unique salt of a request with approximate KV."""
    return f"kvshare-private-{ticket_id}"
