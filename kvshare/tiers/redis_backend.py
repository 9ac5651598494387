"""
Valkey or Redis as a shared tier. Needs the extra `kvshare[redis]`.

    <key>       a value: SET with EX, GETEX
    <channel>   a stream of messages: XADD with MAXLEN and EXPIRE, XRANGE, XREVRANGE
    <name>      the epoch: a random number of the first server; it is lost if the store loses everything
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
)
from redis.exceptions import ConnectionError as NotConnectedError
from redis.exceptions import TimeoutError as TooLateError
from redis.retry import Retry

from kvshare.settings import SharedTierSettings
from kvshare.tiers.seal import read_secret
from kvshare.tiers.shared_backend import BackendError, News

PASSWORD_VARIABLE = "KVSHARE_REDIS_PASSWORD"

_T = TypeVar("_T")

_REASONS: tuple[tuple[type[Exception], str], ...] = (
    (AuthenticationError, "it refuses this user name or password"),
    (AuthorizationError, "it refuses this user name or password"),
    (NoPermissionError, "its access rules refuse this user"),
    (OutOfMemoryError, "its memory is full: set maxmemory-policy to volatile-lru there"),
    (ReadOnlyError, "it is a replica that cannot be written"),
    (TooLateError, "it does not answer in time"),
    (NotConnectedError, "it cannot be reached, or its certificate is not accepted"),
)


class RedisBackend:
    """A `SharedBackend`. It connects with the first call."""

    def __init__(self, settings: SharedTierSettings) -> None:
        """Raises ConfigError if the password's file cannot be read."""
        assert settings.url is not None
        options: dict[str, Any] = {}
        if urlsplit(settings.url).scheme == "rediss":
            options = {
                "ssl_ca_certs": settings.ca_file,
                "ssl_certfile": settings.cert_file,
                "ssl_keyfile": settings.cert_key_file,
                "ssl_cert_reqs": "required",
                "ssl_check_hostname": True,
            }
        self._redis = redis.Redis.from_url(
            settings.url,
            username=settings.username,
            password=read_secret(settings.password_file, PASSWORD_VARIABLE),
            socket_timeout=settings.timeout_s,
            socket_connect_timeout=settings.timeout_s,
            retry=Retry(NoBackoff(), 0),  # the breaker decides when the server is asked again
            **options,
        )

    def put(self, key: str, value: bytes, *, keep_s: int) -> None:
        _asked(lambda: self._redis.set(key, value, ex=keep_s))

    def put_new(self, key: str, value: bytes, *, keep_s: int) -> bool:
        return bool(_asked(lambda: self._redis.set(key, value, ex=keep_s, nx=True)))

    def get(self, key: str, *, keep_s: int) -> bytes | None:
        found: bytes | None = _asked(lambda: self._redis.getex(key, ex=keep_s))
        return found

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        found: list[bytes | None] = _asked(lambda: self._redis.mget(list(keys))) if keys else []
        return found

    def renew(self, keys: Sequence[str], *, keep_s: int) -> list[bool]:
        def ask() -> list[Any]:
            with self._redis.pipeline(transaction=False) as batch:
                for key in keys:
                    batch.expire(key, keep_s)
                return batch.execute()

        return [bool(answer) for answer in _asked(ask)]

    def delete(self, keys: Sequence[str]) -> None:
        if keys:
            _asked(lambda: self._redis.unlink(*keys))

    def announce(self, channel: str, message: bytes, *, most: int, keep_s: int) -> None:
        def ask() -> None:
            with self._redis.pipeline(transaction=False) as batch:
                batch.xadd(channel, {b"m": message}, maxlen=most, approximate=True)
                batch.expire(channel, keep_s)
                batch.execute()

        _asked(ask)

    def news(self, channel: str, *, after: str | None, most: int) -> list[News]:
        first = "-" if after is None else f"({after}"
        return _news(_asked(lambda: self._redis.xrange(channel, min=first, count=most)))

    def latest(self, channel: str, *, before: str | None, most: int) -> list[News]:
        last = "+" if before is None else f"({before}"
        return _news(_asked(lambda: self._redis.xrevrange(channel, max=last, count=most)))

    def epoch(self, name: str, *, keep_s: int) -> str:
        def ask() -> Any:
            self._redis.set(name, secrets.token_hex(8), nx=True, ex=keep_s)
            return self._redis.getex(name, ex=keep_s)

        found = _asked(ask)
        return "" if found is None else bytes(found).decode("ascii", "replace")

    def close(self) -> None:
        self._redis.close()


def _asked(ask: Callable[[], Any]) -> Any:
    """Return what `ask` returns. Raises BackendError, without the server's own text, which may name keys."""
    try:
        return ask()
    except (RedisError, OSError) as exc:
        reason = next((text for kind, text in _REASONS if isinstance(exc, kind)), None)
        raise BackendError(reason or f"it reports {type(exc).__name__}") from None


def _news(entries: Sequence[tuple[bytes, dict[bytes, bytes]]]) -> list[News]:
    return [News(place.decode(), fields.get(b"m", b"")) for place, fields in entries]
