"""
Who may share with whom. A namespace is an exact identity; nothing about it is fuzzy.

Fields are length-framed before hashing, so that ("a", "bc") and ("ab", "c") differ.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields

_DOMAIN = b"kvshare.namespace.v1"


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose KV: what an API key stands for. The rest of a namespace is the model's."""

    tenant: str
    scope: str


@dataclass(frozen=True, slots=True)
class Namespace:
    """
    Everything that must be equal before KV may be shared.

    tenant and scope come from the API key; the rest describes the model, the tokenization and the KV layout,
    and where the KV is, as it cannot move.
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
        """64 hex digits; the key under which tree, index and tiers file this namespace."""
        digest = hashlib.sha256(_DOMAIN)
        for entry in fields(self):
            value = str(getattr(self, entry.name)).encode()
            digest.update(len(value).to_bytes(8, "big"))
            digest.update(value)
        return digest.hexdigest()
