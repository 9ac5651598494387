"""
Parameters that this server does not implement and that would change the answer if it ignored them.

unsupported.yaml has them. What only hints (`user`, `metadata`, `store`, `prompt_cache_key`, `service_tier`,
`verbosity` ...) is not there and passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from kvshare.errors import UnsupportedParameterError

_TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


def refuse_unsupported(api: str, given: Mapping[str, Any]) -> None:
    """Raises UnsupportedParameterError for the first parameter of a body that asks for what is not there."""
    default = _TABLE[api].get("default", "")
    for name, row in _TABLE[api]["parameters"].items():
        value = given.get(name)
        if value is not None and not any(_same(value, entry) for entry in row["neutral"]):
            raise UnsupportedParameterError(name, row.get("hint", default))


def _same(value: object, neutral: object) -> bool:
    """Whether two values are equal; true and 1 are not."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
