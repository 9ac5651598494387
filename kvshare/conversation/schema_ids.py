"""
Finds schemas of a document with the same `$id`. llguidance takes the later one for the earlier, even for the
whole document, so answers would follow another schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvshare.conversation.schema_references import DOCUMENT, NO_SCHEMAS, resolved


def has_equal_ids(schema: Mapping[str, Any]) -> bool:
    """Ids are resolved as URIs: an empty one inside is that of the schema around it."""
    seen: set[str] = set()
    waiting: list[tuple[Any, str]] = [({"$id": "", **schema}, DOCUMENT)]
    while waiting:
        schema_part, base = waiting.pop()
        if isinstance(schema_part, dict):
            if isinstance(schema_part.get("$id"), str):
                base = resolved(schema_part["$id"], base).partition("#")[0]
                if base in seen:
                    return True
                seen.add(base)
            waiting += [(value, base) for key, value in schema_part.items() if key not in NO_SCHEMAS]
        elif isinstance(schema_part, list):
            waiting += [(value, base) for value in schema_part]
    return False
