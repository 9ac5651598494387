"""
The differences that a reload or an administrator has made: each setting and each field of an entry, before
and now, for the answer, the log and the command line. No hash is repeated, and no address with a password.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Differences = Mapping[str, tuple[Any, Any]]
"""By path or field: the value before, and now. `HIDDEN` twice: it differs, and is not shown."""

HIDDEN = "hidden"
_NEVER_SHOWN = frozenset({"sha256", "index.url", "shared_tier.url"})


class Named(Protocol):
    """An entry of a list of settings: a section with a name."""

    @property
    def name(self) -> str: ...

    def model_dump(self, *, by_alias: bool) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class EntryChanges:
    """The differences of a list of settings whose entries have names."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: Mapping[str, Differences] = field(default_factory=dict)  # by name

    @classmethod
    def between(cls, before: Sequence[Named], now: Sequence[Named]) -> EntryChanges:
        """Compare two lists of entries; another order is not a difference."""
        old, new = ({entry.name: entry for entry in entries} for entries in (before, now))
        return cls(
            tuple(name for name in new if name not in old),
            tuple(name for name in old if name not in new),
            {
                name: differences(old[name].model_dump(by_alias=True), new[name].model_dump(by_alias=True))
                for name in new
                if name in old and new[name] != old[name]
            },
        )

    @property
    def document(self) -> dict[str, Any]:
        changed = {name: _documents(of_entry) for name, of_entry in self.changed.items()}
        return {"added": list(self.added), "removed": list(self.removed), "changed": changed}

    def in_words(self, what: str) -> list[str]:
        """`keys alice added`; nothing for a list that did not change."""
        parts = {"added": self.added, "removed": self.removed}
        words = [f"{what} {', '.join(names)} {how}" for how, names in parts.items() if names]
        of_entries = (f"{what} {name}: {_in_words(found)}" for name, found in self.changed.items())
        return [*words, *of_entries]


@dataclass(frozen=True, slots=True)
class Changes:
    """The differences from before. `needs_restart`: in force, and in the files."""

    settings: Differences = field(default_factory=dict)
    keys: EntryChanges = EntryChanges()
    tenants: EntryChanges = EntryChanges()
    rules: EntryChanges = EntryChanges()
    needs_restart: Differences = field(default_factory=dict)

    @property
    def document(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "settings": _documents(self.settings),
            "keys": self.keys.document,
            "tenants": self.tenants.document,
            "rules": self.rules.document,
            "needs_restart": _documents(self.needs_restart),
        }

    def __str__(self) -> str:
        words = [_in_words(self.settings)] if self.settings else []
        for what in ("keys", "tenants", "rules"):
            words += getattr(self, what).in_words(what)
        if self.needs_restart:
            words.append(f"in the files, and in force after a restart: {_in_words(self.needs_restart)}")
        return "; ".join(words) or "nothing changed"


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Differences:
    """The values that differ, both by the same keys."""
    return {
        key: (HIDDEN, HIDDEN) if key in _NEVER_SHOWN else (before[key], value)
        for key, value in now.items()
        if before[key] != value
    }


def _documents(found: Differences) -> dict[str, Any]:
    return {key: {"from": old, "to": new} for key, (old, new) in found.items()}


def _in_words(differences: Differences) -> str:
    return ", ".join(
        f"{key} is another one" if new is HIDDEN else f"{key} is {_word(new)}, was {_word(old)}"
        for key, (old, new) in differences.items()
    )


def _word(value: Any) -> Any:
    return "null" if value is None else value
