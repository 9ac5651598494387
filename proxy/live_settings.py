"""
The settings in force, and how they change while the server runs: from their file and the file of keys
(SIGHUP, `POST /admin/reload`), or one by one (`POST /admin/settings`).

What cannot change on a running server waits for a restart, and is named. What is wrong changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvshare import safe_logging
from kvshare.engine import Engine
from kvshare.errors import ConfigError
from kvshare.settings import Access, Settings, SettingsSource, access_of, flattened, validated
from kvshare.settings.reading import Origin
from proxy.auth import Keyring
from proxy.quotas import Quotas
from proxy.setting_changes import Changes, Differences, EntryChanges, differences

log = logging.getLogger(__name__)

CHANGEABLE = (
    *("auth.keys", "auth.keys_file", "auth.tenants", "control.shadow_share", "engine.max_waiting"),
    *("logging.level", "rules"),
    *("server.cors_origins", "server.drain_s", "server.keep_alive_s", "sharing.max_mode", "sharing.mode"),
)
"""The settings that can change while the server runs."""

_KEYS = "auth.keys"
_SWITCHES = tuple(path for path in CHANGEABLE if not path.startswith("auth.") and path != "rules")


@dataclass(frozen=True, slots=True)
class _Read:
    """The settings of the files as they were read last."""

    settings: Settings
    origins: Mapping[str, Origin]


@dataclass(frozen=True, slots=True)
class _InForce:
    """The settings that are in force at one time."""

    settings: Settings
    origins: Mapping[str, Origin]
    access: Access
    keyring: Keyring
    needs_restart: Differences = field(default_factory=dict)


class LiveSettings:
    """The settings of one server. `settings`, `access` and `keyring` are replaced as wholes."""

    def __init__(self, settings: Settings, engine: Engine, source: SettingsSource | None = None) -> None:
        """
        `source`: where `settings` were read from; None: nowhere, and only keys are read again.

        Raises:  ConfigError for keys that cannot be used
        """
        self._started = settings
        self._source = source
        self._engine = engine
        self._set: dict[str, Any] = {}  # on the running server, by path
        self._changing = asyncio.Lock()
        self.problem: str | None = None  # why the files could not be read again last time
        self._read = self._read_files()
        self._now = self._made({}, access_of(self._read.settings))
        self.quotas = Quotas(self._now.access)
        self._on_change: list[Callable[[], None]] = []
        engine.tenants.use_limits(lambda tenant: self._now.access.limits_of(tenant).max_kv_bytes)

    def on_change(self, act: Callable[[], None]) -> None:
        self._on_change.append(act)
        act()

    @property
    def settings(self) -> Settings:
        return self._now.settings

    @property
    def access(self) -> Access:
        return self._now.access

    @property
    def keyring(self) -> Keyring:
        return self._now.keyring

    @property
    def needs_restart(self) -> tuple[str, ...]:
        """Settings that differ in the files and cannot change now."""
        return tuple(self._now.needs_restart)

    async def reload(self) -> Changes:
        """Read all again. Raises ConfigError, and changes nothing then. What `change` has set stays set."""
        async with self._changing:
            try:
                read, access = await asyncio.to_thread(self._read_again)
            except ConfigError as exc:
                self.problem = str(exc)
                raise
            self.problem = None
            now = self._made(self._set, access, read)
            self._read = read
            return self._go_on_with(now)

    async def change(self, values: Mapping[str, Any]) -> Changes:
        """
        Set settings by their paths, until the server stops; None: as the files say.

        Raises:  ConfigError for one that is unknown, wrong, or cannot change now; nothing is changed then
        """
        for path in values:
            if path not in _SWITCHES:
                raise ConfigError(
                    path, f"cannot be set on a running server; expected one of {', '.join(_SWITCHES)}"
                )
        async with self._changing:
            chosen = {path: value for path, value in {**self._set, **values}.items() if value is not None}
            now = self._made(chosen, self._now.access)  # from what was read last: files may be wrong now
            self._set = chosen
            return self._go_on_with(now)

    def document(self) -> dict[str, Any]:
        """Each setting with its value and origin, and whether it can change now. Without hashes of keys."""
        values = flattened(self.settings.model_dump(mode="json", by_alias=True))
        values[_KEYS] = [key.model_dump(exclude={"sha256"}) for key in self.settings.auth.keys]
        return {
            "settings": {
                path: {
                    "value": value,
                    "origin": Origin.RUNNING if path in self._set else self._now.origins[path],
                    "changeable": path in CHANGEABLE,
                    "settable": path in _SWITCHES,
                }
                for path, value in values.items()
            },
            "needs_restart": list(self._now.needs_restart),
        }

    def _go_on_with(self, now: _InForce) -> Changes:
        before, self._now = self._now, now
        changes = _changes(before, now)
        self.quotas.use(now.access)
        if "logging.level" in changes.settings:
            safe_logging.set_level(now.settings.logging.level)
        self._engine.reconfigure(now.settings)
        for act in self._on_change:
            act()
        log.warning("settings in force: %s", changes)
        return changes

    def _read_files(self) -> _Read:
        """Raises ConfigError. Blocks."""
        if self._source is None:
            return _Read(self._started, dict.fromkeys(_values(self._started), Origin.DEFAULT))
        return _Read(*self._source.read())

    def _read_again(self) -> tuple[_Read, Access]:
        """
        The files of settings and keys. Blocks.

        Raises:  ConfigError, also where no key would be left
        """
        read = self._read_files()
        access = access_of(read.settings)
        if self._now.access.keys and not access.keys:
            problem = "without any, the server would be open to all; that needs a restart"
            raise ConfigError("auth", f"expected at least one key: {problem}")
        return read, access

    def _made(self, chosen: Mapping[str, Any], access: Access, read: _Read | None = None) -> _InForce:
        """Return what was read, with `chosen` on top, as far as it can change now. Raises ConfigError."""
        read = read or self._read
        asked, tree = _values(read.settings), self._started.model_dump(by_alias=True)
        for path in CHANGEABLE:
            section, _, key = path.rpartition(".")
            (tree[section] if section else tree)[key] = chosen.get(path, asked[path])
        different = differences(_values(self._started), asked)
        later = {path: pair for path, pair in different.items() if path not in CHANGEABLE}
        return _InForce(validated(tree), read.origins, access, Keyring(access.keys), later)


def _values(settings: Settings) -> dict[str, Any]:
    return flattened(settings.model_dump(by_alias=True))


def _changes(before: _InForce, now: _InForce) -> Changes:
    lists = ("auth.keys", "auth.tenants", "rules")  # each entry is compared by its name
    old, new = (
        {path: value for path, value in _values(each.settings).items() if path in CHANGEABLE}
        for each in (before, now)
    )
    changed = {path: pair for path, pair in differences(old, new).items() if path not in lists}
    was, rules = before.settings.rules, now.settings.rules
    names = [[rule.name for rule in each] for each in (was, rules)]
    if names[0] != names[1]:  # their order counts
        changed["rules"] = (names[0], names[1])
    return Changes(
        changed,
        EntryChanges.between(before.access.keys, now.access.keys),
        EntryChanges.between(before.access.tenants, now.access.tenants),
        EntryChanges(changed=EntryChanges.between(was, rules).changed),
        now.needs_restart,
    )
