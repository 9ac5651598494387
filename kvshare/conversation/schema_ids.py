"""
Whether two schemas of a document have the same `$id`: llguidance takes the later one for the earlier, the
whole document included, so that answers follow another schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urljoin

_DOCUMENT = "http://document/"  # what a schema without `$id` counts as; llguidance calls it json-schema:///
_NO_SCHEMAS = frozenset(("const", "enum", "default", "examples"))


def has_equal_ids(schema: Mapping[str, Any]) -> bool:
    """Ids are resolved as URIs: an empty one inside is that of the schema around it."""
    seen: set[str] = set()
    waiting: list[tuple[Any, str]] = [({"$id": "", **schema}, _DOCUMENT)]
    while waiting:
        each, base = waiting.pop()
        if isinstance(each, dict):
            if isinstance(each.get("$id"), str):
                base = _resolved(each["$id"], base)
                if base in seen:
                    return True
                seen.add(base)
            waiting += [(value, base) for key, value in each.items() if key not in _NO_SCHEMAS]
        elif isinstance(each, list):
            waiting += [(value, base) for value in each]
    return False


def _resolved(own: str, base: str) -> str:
    try:
        return urljoin(base, own.replace("json-schema:///", _DOCUMENT)).partition("#")[0]
    except ValueError:  # not a URI
        return own
