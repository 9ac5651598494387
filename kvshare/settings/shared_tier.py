"""The section `shared_tier`: a Valkey or Redis in which several servers keep KV for each other."""

from __future__ import annotations

from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, PositiveFloat, model_validator

from kvshare.loopback import is_loopback
from kvshare.settings.section import PositiveBytes, Section


def _redis_url(url: str) -> str:
    """Raises ValueError that says what is wrong, and does not quote what may be a password."""
    try:
        parts = urlsplit(url)
        number = parts.path.removeprefix("/")
        is_url = parts.scheme in {"redis", "rediss"} and parts.hostname and (parts.port or 1)
    except ValueError:
        is_url, number = False, ""
    if not is_url or (number and not number.isdecimal()):
        raise ValueError("expected redis://HOST:PORT/NUMBER, or rediss:// for TLS")
    if parts.username or parts.password:
        raise ValueError(
            "expected no user name or password: use username, and password_file or the environment"
        )
    if parts.query or parts.fragment:
        raise ValueError("expected nothing after the number of the database")
    return url


class SharedTierSettings(Section):
    url: Annotated[str, AfterValidator(_redis_url)] | None
    username: str | None
    password_file: str | None
    ca_file: str | None
    cert_file: str | None
    cert_key_file: str | None
    seal_key_file: str | None
    trusted: bool
    max_bytes: PositiveBytes
    keep_s: Annotated[int, Field(ge=60)]
    timeout_s: PositiveFloat

    @model_validator(mode="after")
    def _check_pair(self) -> Self:
        if (self.cert_file is None) != (self.cert_key_file is None):
            raise ValueError("expected cert_file and cert_key_file, or neither")
        return self

    @property
    def is_exposed(self) -> bool:
        """Return whether others may read and change what is on the way: no TLS, and not this machine."""
        if self.url is None:
            return False
        parts = urlsplit(self.url)
        return parts.scheme != "rediss" and not is_loopback(parts.hostname or "")
