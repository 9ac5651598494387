"""
Reads the settings: the defaults, then a file, then the environment, then options, each above the one before.
Says of each value where it comes from. An unknown key is an error that names its path.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kvshare.errors import ConfigError
from kvshare.settings.auth import Access
from kvshare.settings.sections import Settings
from kvshare.tables import parsed

_PACKAGE = Path(__file__).parents[1]
_PREFIX = "KVSHARE_"
_NAMED = {"KVSHARE_QDRANT_URL": "index.url"}  # variables with a name of their own, above all else
_HASH = "sha256"  # never repeated: it may be the key itself, by mistake
_CREDENTIALS = re.compile(r"//[^/@\s]*@")  # in an address
_KEYS = "keys"
_SHARED = "shared_tier"  # its address is never repeated: a password in it may have any characters


class Origin(StrEnum):
    """The origin of a value."""

    DEFAULT = "default"
    FILE = "file"
    ENVIRONMENT = "environment"
    OPTION = "option"
    RUNNING = "set on the running server"


def default_config_path() -> Path:
    """config.yaml inside the installed package, or at the root of a checkout."""
    packaged = _PACKAGE / "config.yaml"
    return packaged if packaged.exists() else _PACKAGE.parent / "config.yaml"


@dataclass(frozen=True, slots=True)
class SettingsSource:
    """The source of settings, which can be read again. `options`: "server.port" -> 8001."""

    path: Path | None = None
    options: Mapping[str, object] = field(default_factory=dict)

    def load(self) -> Settings:
        """
        Return the settings as they are now.

        Raises:  ConfigError naming the key path of each unknown key and wrong value; for unreadable files
        """
        return self.read()[0]

    def read(self) -> tuple[Settings, Mapping[str, Origin]]:
        """Return the same, with the origin of each setting by its path."""
        tree = _read(default_config_path())
        origins = dict.fromkeys(flattened(tree), Origin.DEFAULT)
        mistakes: list[tuple[str, str]] = []
        for origin, change in self._layers(tree):
            mistakes += _overlay(tree, change, at="")
            origins |= {path: origin for path in flattened(change) if path in origins}
        return validated(tree, mistakes), origins

    def _layers(self, tree: Mapping[str, Any]) -> Iterator[tuple[Origin, dict[str, Any]]]:
        if self.path is not None:
            yield Origin.FILE, _read(self.path)
        for path, value in _environment(tree):
            yield Origin.ENVIRONMENT, _branch(path, value)
        for path, value in self.options.items():
            yield Origin.OPTION, _branch(path, value)
        for name, path in _NAMED.items():
            if value := os.environ.get(name):
                yield Origin.ENVIRONMENT, _branch(path, value)


def load_settings(path: Path | None = None, overrides: Mapping[str, object] | None = None) -> Settings:
    """Return the settings with the file at `path`, the environment and `overrides`. Raises ConfigError."""
    return SettingsSource(path, overrides or {}).load()


def access_of(settings: Settings) -> Access:
    """
    Return all keys and tenants, also those of `auth.keys_file`, which is read now.

    Raises:  ConfigError naming file and key path
    """
    auth = settings.auth
    file = Access() if auth.keys_file is None else _read_access(Path(auth.keys_file))
    access = Access(keys=(*auth.keys, *file.keys), tenants=auth.tenants)
    whole = access.model_copy(update={"tenants": (*auth.tenants, *file.tenants)})
    if auth.keys_file is not None and not whole.keys:
        raise ConfigError(
            "auth", f"expected at least one key, {auth.keys_file} has none: all could use the server"
        )
    if whole.problem is not None:
        raise ConfigError("auth" if auth.keys_file else "auth.keys", whole.problem)
    return whole


def flattened(tree: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """Return the values of all settings by their paths; a list is one value."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        is_section = isinstance(value, Mapping) and not at
        flat |= flattened(value, f"{key}.") if is_section else {f"{at}{key}": value}
    return flat


def validated(tree: Mapping[str, Any], mistakes: list[tuple[str, str]] | None = None) -> Settings:
    """Return the tree of all settings as `Settings`. Raises ConfigError, with `mistakes` first."""
    mistakes = list(mistakes or ())
    try:
        settings = Settings.model_validate(tree)
        if not mistakes:
            return settings
    except ValidationError as exc:
        mistakes += [_described(error) for error in exc.errors()]
    first, *others = mistakes
    raise ConfigError(*first, *others)


def _environment(tree: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """
    Settings in the environment: KVSHARE_SERVER__PORT is server.port. Values are written as in YAML.

    A variable with two underscores that names no setting is passed on too, and becomes an error.
    """
    sections = {name.upper() for name, value in tree.items() if not isinstance(value, Mapping)}
    for name, text in sorted(os.environ.items()):
        rest = name.removeprefix(_PREFIX)
        if rest == name or not ("__" in rest or rest in sections):
            continue
        path = rest.lower().replace("__", ".")
        try:
            yield path, yaml.safe_load(text) if text else None
        except yaml.YAMLError as exc:
            raise ConfigError(name, f"cannot be read as YAML: {_where(exc)}") from exc


def _branch(path: str, value: object) -> dict[str, Any]:
    branch: Any = value
    for key in reversed(path.split(".")):
        branch = {key: branch}
    found: dict[str, Any] = branch
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        try:
            tree = parsed(text)
        except yaml.YAMLError:
            tree = yaml.safe_load(text)  # slower, and its errors say more
    except FileNotFoundError as exc:
        raise ConfigError(str(path), "no such file") from exc
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as exc:
        raise ConfigError(str(path), f"cannot be read as YAML: {_where(exc)}") from exc
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(str(path), f"expected a mapping of sections, got {type(tree).__name__}")
    return tree


def _where(exc: Exception) -> str:
    """On one line, without the text that was read: it may have a key in it."""
    if isinstance(exc, yaml.MarkedYAMLError) and exc.problem_mark is not None:
        return f"{exc.problem} in line {exc.problem_mark.line + 1}"
    if isinstance(exc, OSError):
        return exc.strerror or type(exc).__name__
    return "it is not text of this form"


def _read_access(path: Path) -> Access:
    tree = _read(path)
    try:
        return Access.model_validate(tree)
    except ValidationError as exc:
        first, *others = ((f"{path}: {at}", problem) for at, problem in map(_described, exc.errors()))
        raise ConfigError(*first, *others) from exc


def _described(error: ErrorDetails) -> tuple[str, str]:
    """Key path and problem of one of pydantic's errors."""
    key_path, text = ".".join(map(str, error["loc"])), error["msg"].removeprefix("Value error, ")
    if error["type"] == "missing":
        return key_path, "expected a value, got none"
    if error["type"] == "extra_forbidden":
        return key_path, "unknown key"
    if _HASH in error["loc"]:
        return (
            key_path,
            f"expected 64 hex digits, as `kvshare hash-key` prints them, got {_sized(error['input'])}",
        )
    # What stands there may be a key, or have a password in it.
    is_secret = _KEYS in error["loc"] or error["loc"] in ((_SHARED,), (_SHARED, "url"))
    found = _sized(error["input"]) if is_secret else _CREDENTIALS.sub("//...@", repr(error["input"]))
    return key_path, f"{text.replace('Input should be', 'expected')}, got {found}"


def _sized(value: object) -> str:
    return f"{len(value)} characters" if isinstance(value, str) else f"a value of type {type(value).__name__}"


def _overlay(tree: dict[str, Any], changes: Mapping[str, Any], *, at: str) -> Iterator[tuple[str, str]]:
    """Write `changes` into `tree`, which has every known key. Yields the key path and problem of mistakes."""
    for key, value in changes.items():
        key_path = f"{at}{key}"
        if key not in tree:
            known = ", ".join(sorted(tree))
            yield key_path, f"unknown key; expected one of: {known}"
        elif not isinstance(tree[key], dict):
            tree[key] = value
        elif isinstance(value, Mapping):
            yield from _overlay(tree[key], value, at=f"{key_path}.")
        else:
            found = _sized(value) if key_path == _SHARED else repr(value)
            yield key_path, f"expected a section with keys, got {found}"
