"""Opens the shared tier of the settings. It connects at its first use, and may fail only then."""

from __future__ import annotations

import logging
import socket
from urllib.parse import urlsplit

from kvshare.errors import ConfigError
from kvshare.extras import require_modules
from kvshare.loopback import is_loopback
from kvshare.settings import SharedTierSettings
from kvshare.tiers.kv_object import ObjectForm
from kvshare.tiers.seal import Seal, read_key
from kvshare.tiers.shared_segments import SegmentNews
from kvshare.tiers.shared_tier import SharedStore, SharedTier

log = logging.getLogger(__name__)


def open_shared_tier(
    settings: SharedTierSettings, form: ObjectForm, *, announces_segments: bool = False
) -> SharedTier:
    """`announces_segments`: for vLLMs, which know no prompts. Raises ConfigError, MissingExtraError."""
    store = open_shared_store(settings, form.fingerprint)
    how = "sealed" if store.seal.seals else "not sealed: who can read it reads prompts"
    log.info("KV is shared through a store, %s", how)
    announce = SegmentNews(store).announce if announces_segments else None
    return SharedTier(store, form, max_bytes=settings.max_bytes, announce=announce)


def open_shared_store(settings: SharedTierSettings, fingerprint: str) -> SharedStore:
    """`fingerprint`: that of the objects' `ObjectForm`. Raises ConfigError, MissingExtraError."""
    seal = checked_seal(settings)
    from kvshare.tiers.redis_backend import RedisBackend

    return SharedStore(RedisBackend(settings), fingerprint, seal=seal, keep_s=settings.keep_s)


def checked_seal(settings: SharedTierSettings) -> Seal:
    """Make the seal, with the operator's key if there is one. Raises ConfigError, MissingExtraError."""
    require_modules("redis", what="shared_tier.url")
    key = read_key(settings.seal_key_file)
    if key is None and settings.is_exposed and not settings.trusted:
        raise ConfigError(
            "shared_tier.url",
            "prompts would cross the network as they are; expected rediss:// (TLS), a key in "
            "shared_tier.seal_key_file, or shared_tier.trusted: true for a network that only you can reach",
        )
    return Seal(key)


def place_name(settings: SharedTierSettings, store: SharedStore) -> str:
    """
    Name the store: the name is the same for all that keep KV of one form at this address with the same key,
    and without the key it does not reveal the address. A loopback address is another place on each machine.
    """
    assert settings.url is not None
    parts = urlsplit(settings.url)
    host = parts.hostname or ""
    machine = socket.gethostname() if is_loopback(host) else host
    place = f"{machine}:{parts.port or 6379}:{parts.path.removeprefix('/') or '0'}"
    return store.seal.name_of(store.prefix.encode(), place.encode())
