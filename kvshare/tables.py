"""Reads the YAML files that are part of the program, which is done at each start: quickly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

try:  # ten times as fast, where PyYAML was built with libyaml
    from yaml import CSafeLoader as Loader
except ImportError:
    from yaml import SafeLoader as Loader  # type: ignore[assignment]  # the same in Python


def read_table(path: Path) -> Any:
    """Return the document of a file that comes with the program: it is well-formed."""
    return parsed(path.read_text(encoding="utf-8"))


def parsed(text: str) -> Any:
    """Return a YAML document. Raises yaml.YAMLError."""
    return yaml.load(text, Loader=Loader)
