"""Opens the shared tier that the settings name. It connects when it is first used, and may fail then."""

from __future__ import annotations

import logging

from kvshare.errors import ConfigError
from kvshare.extras import require_modules
from kvshare.settings import SharedTierSettings
from kvshare.tiers.kv_object import ObjectForm
from kvshare.tiers.seal import Seal, read_key
from kvshare.tiers.shared_tier import SharedStore, SharedTier

log = logging.getLogger(__name__)


def open_shared_tier(settings: SharedTierSettings, form: ObjectForm) -> SharedTier:
    """Raises ConfigError, MissingExtraError."""
    require_modules("redis", what="shared_tier.url")
    from kvshare.tiers.redis_backend import RedisBackend

    key = read_key(settings.seal_key_file)
    if key is None and settings.is_exposed and not settings.trusted:
        raise ConfigError(
            "shared_tier.url",
            "prompts would cross the network as they are; expected rediss:// (TLS), a key in "
            "shared_tier.seal_key_file, or shared_tier.trusted: true for a network that only you can reach",
        )
    store = SharedStore(RedisBackend(settings), form, seal=Seal(key), keep_s=settings.keep_s)
    how = "sealed" if key else "not sealed: who can read it reads prompts"
    log.info("KV is shared through a store, %s", how)
    return SharedTier(store, form, max_bytes=settings.max_bytes)
