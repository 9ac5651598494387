"""Reads config.yaml into `Settings`. An unknown key is an error that names its path."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kvshare.errors import ConfigError
from kvshare.settings.sections import Settings

_PACKAGE = Path(__file__).parents[1]


def default_config_path() -> Path:
    """config.yaml inside the installed package, or at the root of a checkout."""
    packaged = _PACKAGE / "config.yaml"
    return packaged if packaged.exists() else _PACKAGE.parent / "config.yaml"


def load_settings(path: Path | None = None, overrides: Mapping[str, object] | None = None) -> Settings:
    """
    The defaults, overridden by the file at `path`, then by `overrides` ("server.port" -> 8001).

    Raises:  ConfigError naming the key path of each unknown key and wrong value; for unreadable files
    """
    tree = _read(default_config_path())
    changes = [] if path is None else [_read(path)]
    for key_path, value in (overrides or {}).items():
        branch: Any = value
        for key in reversed(key_path.split(".")):
            branch = {key: branch}
        changes.append(branch)
    mistakes = [mistake for change in changes for mistake in _overlay(tree, change, at="")]
    if url := os.environ.get("KVSHARE_QDRANT_URL"):
        tree["index"]["url"] = url
    try:
        settings = Settings.model_validate(tree)
        if not mistakes:
            return settings
    except ValidationError as exc:
        mistakes += [_told(error) for error in exc.errors()]
    first, *others = mistakes
    raise ConfigError(*first, *others)


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as exc:
        raise ConfigError(str(path), "no such file") from exc
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as exc:
        raise ConfigError(str(path), f"cannot be read as YAML: {exc}") from exc
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(str(path), f"expected a mapping of sections, got {type(tree).__name__}")
    return tree


def _told(error: ErrorDetails) -> tuple[str, str]:
    """Key path and problem of one of pydantic's errors."""
    key_path, text = ".".join(map(str, error["loc"])), error["msg"].removeprefix("Value error, ")
    if error["type"] == "missing":
        return key_path, "expected a value, got none"
    return key_path, f"{text.replace('Input should be', 'expected')}, got {error['input']!r}"


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
            yield key_path, f"expected a section with keys, got {value!r}"
