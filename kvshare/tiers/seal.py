"""
Seals values for a store that others can read: AES-256-GCM with the operator's key, bound to the value's name.

    8 bytes   `MAGIC`
    12 bytes  nonce, drawn at random: one key is safe for 2**32 values
    the rest  the encrypted value, and its tag of 16 bytes

A sealed value that was changed, or lies under another name, is not opened. With a key, a value that is not
sealed is not opened either.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
from pathlib import Path
from typing import Final

from kvshare.errors import ConfigError

MAGIC: Final = b"KVSEAL1\0"
_NONCE_BYTES: Final = 12
_TAG_BYTES: Final = 16
_KEY_BYTES: Final = 32
_MOST_KEY_TEXT: Final = 4096
SEAL_VARIABLE: Final = "KVSHARE_SEAL_KEY"


class SealError(Exception):
    """A value is not one that was sealed under this name, with this key."""


class Seal:
    """Encrypts values; without a key they stay as they are. Thread-safe."""

    def __init__(self, key: bytes | None) -> None:
        """`key`: 32 bytes. Raises ImportError without the extra `redis`."""
        self._names = b"" if key is None else hashlib.sha256(b"kvshare names" + key).digest()
        self._cipher = None
        if key is not None:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM

            self._cipher = AESGCM(key)

    @property
    def seals(self) -> bool:
        return self._cipher is not None

    def name_of(self, *parts: bytes) -> str:
        """Hash the parts to 32 hex digits, which reveal nothing of them without the key."""
        framed = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
        return hmac.new(self._names, framed, hashlib.sha256).hexdigest()[:32]

    def sealed(self, name: str, value: bytes) -> bytes:
        if self._cipher is None:
            return value
        nonce = os.urandom(_NONCE_BYTES)
        return MAGIC + nonce + self._cipher.encrypt(nonce, value, name.encode())

    def opened(self, name: str, value: bytes) -> memoryview:
        """Decrypt a value; without a key, return it as it is. Raises SealError."""
        if self._cipher is None:
            if value.startswith(MAGIC):
                raise SealError("it is sealed, and this server has no key")
            return memoryview(value)
        if not value.startswith(MAGIC):
            raise SealError("it is not sealed")
        from cryptography.exceptions import InvalidTag

        start = len(MAGIC) + _NONCE_BYTES
        if len(value) < start + _TAG_BYTES:
            raise SealError("it is not whole")
        try:
            opened = self._cipher.decrypt(value[len(MAGIC) : start], memoryview(value)[start:], name.encode())
        except InvalidTag:
            raise SealError("it was sealed with another key, or was changed") from None
        return memoryview(opened)


def read_secret(file: str | None, variable: str) -> str | None:
    """
    Read a secret from `file`, or if that is None from the environment, and strip blanks; None if not set.

    Raises:  ConfigError, which names the file but never quotes it
    """
    if file is None:
        return os.environ.get(variable, "").strip() or None
    try:
        with Path(file).open(encoding="utf-8") as opened:
            text = opened.read(_MOST_KEY_TEXT).strip()
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "it is not text"
        raise ConfigError(file, f"the secret cannot be read: {reason}") from None
    if not text:
        raise ConfigError(file, "expected a secret, the file is empty")
    return text


def read_key(file: str | None) -> bytes | None:
    """Read the key that seals values: 64 hex digits or base64. Raises ConfigError, which never quotes it."""
    text = read_secret(file, SEAL_VARIABLE)
    if text is None:
        return None
    for decode in (bytes.fromhex, lambda given: base64.b64decode(given, validate=True)):
        try:
            key = decode(text)
        except (ValueError, binascii.Error):
            continue
        if len(key) == _KEY_BYTES:
            return key
    raise ConfigError(
        file or SEAL_VARIABLE,
        "expected a key of 32 bytes as 64 hex digits or base64, as `openssl rand -hex 32` prints",
    )
