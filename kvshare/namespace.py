"""
Namespaces: KV is shared only between prompts whose namespaces are exactly equal.

Fields are hashed with their lengths, so that ("a", "bc") and ("ab", "c") differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import lru_cache

_DOMAIN = b"kvshare.namespace.v1"
_SALT_DOMAIN = b"kvshare.client_salt.v1"


@dataclass(frozen=True, slots=True)
class Owner:
    """
    The owner of KV: tenant and scope come from the API key, and a request's own salt divides their space.

    The other fields of a namespace describe the model.
    """

    tenant: str
    scope: str
    salt: str = ""  # a digest: the salt itself is the client's secret; empty: not divided

    def divided(self, salt: str) -> Owner:
        """The owner of the part that this salt names. A part can be divided again, and never be left."""
        return replace(self, salt=framed_digest(_SALT_DOMAIN, (self.salt, salt)))


@dataclass(frozen=True, slots=True)
class Namespace:
    """
    Everything that must be equal before KV may be shared.

    tenant, scope and salt are those of the `Owner`. The other fields describe the model, the tokenization,
    the KV layout and the holder of the KV, as KV cannot move between holders.
    """

    tenant: str
    scope: str  # "private": one API key; "tenant": all keys of the tenant
    model: str
    revision: str  # digest of the weights' identity
    tokenizer: str  # digest of tokenizer and chat template
    dtype: str
    kv_layout: str  # layers, kv heads, head dim
    rope: str  # digest of the rotary frequencies
    lora: str = ""
    holder: str = ""  # whose memory holds the KV: a replica's name; empty: this process
    salt: str = ""

    @property
    def digest(self) -> str:
        """64 hex digits: the key of this namespace in tree, index and tiers."""
        return _digest(self)


@lru_cache(maxsize=1024)
def _digest(namespace: Namespace) -> str:
    """A request asks for it nine times."""
    parts = [str(getattr(namespace, entry.name)) for entry in fields(namespace)]
    # Stores from before salts keep their keys. Framed parts are never equal to one part more.
    return framed_digest(_DOMAIN, parts if namespace.salt else parts[:-1])


def framed_digest(domain: bytes, parts: Iterable[str]) -> str:
    """64 hex digits that only these parts in this order give, under this domain."""
    digest = hashlib.sha256(domain)
    for part in parts:
        raw = part.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "big"))
        digest.update(raw)
    return digest.hexdigest()


def joined(parts: Iterable[str], *, by: str = ":") -> str:
    """One string, of parts with the sign `by` between them, escaped as in URLs: no other parts give it."""
    return by.join(part.replace("%", "%25").replace(by, f"%{ord(by):X}") for part in parts)
