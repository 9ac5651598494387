"""Reads the YAML files that lie beside the modules of the lab: texts, option tables, words of the report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml


def texts_beside(module: str, name: str) -> Mapping[str, Any]:
    """The contents of the YAML file `name` in the folder of a module, whose `__file__` is given."""
    texts: Mapping[str, Any] = yaml.safe_load(Path(module).with_name(name).read_text(encoding="utf-8"))
    return texts
