"""
Namespaces: KV is shared only between prompts whose namespaces are exactly equal.

Fields are hashed with their lengths, so that ("a", "bc") and ("ab", "c") differ.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields

_DOMAIN = b"kvshare.namespace.v1"


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner of KV, from the API key. The other fields of a namespace describe the model."""

    tenant: str
    scope: str


@dataclass(frozen=True, slots=True)
class Namespace:
    """
    Everything that must be equal before KV may be shared.

    tenant and scope come from the API key. The other fields describe the model, the tokenization, the KV
    layout and the holder of the KV, as KV cannot move between holders.
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

    @property
    def digest(self) -> str:
        """64 hex digits: the key of this namespace in tree, index and tiers."""
        digest = hashlib.sha256(_DOMAIN)
        for entry in fields(self):
            value = str(getattr(self, entry.name)).encode()
            digest.update(len(value).to_bytes(8, "big"))
            digest.update(value)
        return digest.hexdigest()
