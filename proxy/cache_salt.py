"""
A client's `cache_salt`: requests of one API key share KV only if their salts are equal.

It divides the space of the key and cannot name another one, in every store and lookup, because it is a part
of the owner from which namespaces, and the salts that vLLM gets, are made. Only a digest of it goes on from
here: a client that guesses it can observe what was sent under it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from kvshare.namespace import Owner
from proxy.wrong_values import found, invalid

MAX_SALT = 128  # characters, as vLLM 0.32 limits it

_DESCRIPTION = "Only requests of the same key's space that have the same salt share."
CacheSalt = Annotated[str, Field(min_length=1, max_length=MAX_SALT, description=_DESCRIPTION)] | None


def divided(owner: Owner, document: Mapping[str, Any]) -> Owner:
    """
    `owner`, divided by the `cache_salt` of a body. One in `vllm_xargs`, which vLLM ignores, divides it, too.

    Raises:  RequestError for what is not a salt; null is the same as none
    """
    xargs = document.get("vllm_xargs")
    inner = xargs.get("cache_salt") if isinstance(xargs, Mapping) else None
    for param, salt in (("cache_salt", document.get("cache_salt")), ("vllm_xargs.cache_salt", inner)):
        if salt is not None:
            owner = owner.divided(_checked(param, salt))
    return owner


def _checked(param: str, salt: object) -> str:
    if not isinstance(salt, str) or not salt:
        raise invalid(param, f"expected a string that is not empty, got {found(salt)}")
    if len(salt) > MAX_SALT:
        raise invalid(param, f"expected at most {MAX_SALT} characters, got {len(salt)}")
    return salt
