"""
API keys and tenants: in the settings, and in a file of their own (`auth.keys_file`) that an operator may
change while the server runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveInt

from kvshare.settings.section import Bytes, Mode, Section

OTHERS = "*"
"""The name of the limits that hold for each tenant without an entry of its own."""


class KeySettings(Section):
    """One API key, by its hash. Keys of one tenant with scope "tenant" share KV."""

    name: str = Field(min_length=1)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    tenant: str = Field(min_length=1)
    scope: Literal["private", "tenant"] = "tenant"
    role: Literal["infer", "admin"] = "infer"


class TenantSettings(Section):
    """The limits of one tenant, with all its keys together. None: no limit."""

    name: str = Field(min_length=1)
    requests_per_minute: PositiveInt | None = None
    max_in_flight: PositiveInt | None = None
    max_kv_bytes: Bytes | None = None
    max_mode: Mode = "approx"


def _once(tenants: tuple[TenantSettings, ...]) -> tuple[TenantSettings, ...]:
    """Raises ValueError where two entries have one name."""
    if (twice := _first_twice(tenant.name for tenant in tenants)) is not None:
        raise ValueError(f"expected each tenant once, two entries are called {twice!r}")
    return tenants


Keys = Annotated[tuple[KeySettings, ...], Field(strict=False)]
Tenants = Annotated[tuple[TenantSettings, ...], Field(strict=False), AfterValidator(_once)]


class AuthSettings(Section):
    keys: Keys
    tenants: Tenants
    keys_file: str | None


class Access(Section):
    """All keys and tenants: those of the settings, then those of `auth.keys_file`, which has both lists."""

    keys: Keys = ()
    tenants: Tenants = ()

    @property
    def problem(self) -> str | None:
        """Return a problem of entries that are alike where they must differ; None if nothing is wrong."""
        for field in ("name", "sha256"):
            if _first_twice(getattr(key, field) for key in self.keys) is not None:
                return f"two keys have the same {field}"
        if (twice := _first_twice(tenant.name for tenant in self.tenants)) is not None:
            return f"two entries of tenants are called {twice!r}"
        return None

    def limits_of(self, tenant: str) -> TenantSettings:
        """Return the tenant's own entry, else that of all others, else none."""
        named = {entry.name: entry for entry in self.tenants}
        found = named.get(tenant) or named.get(OTHERS) or TenantSettings(name=tenant)
        return found.model_copy(update={"name": tenant})


def _first_twice(values: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for value in values:
        if value in seen:
            return value
        seen.add(value)
    return None
