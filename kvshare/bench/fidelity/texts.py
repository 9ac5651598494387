"""Reads the YAML files that lie beside the modules of the lab: texts, option tables. Each is read once."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml


def texts_beside(module: str, name: str) -> Mapping[str, Any]:
    """The contents of the YAML file `name` in the folder of a module, whose `__file__` is given."""
    return _texts(Path(module).with_name(name))


@cache
def _texts(path: Path) -> Mapping[str, Any]:
    texts: Mapping[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return texts
