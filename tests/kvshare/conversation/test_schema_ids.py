"""Ids that would let an answer follow another schema of the document."""

from typing import Any

import pytest

from kvshare.conversation.schema_ids import has_equal_ids


def inside(own: str, **root: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"b": {"type": "integer", "$id": own}}, **root}


@pytest.mark.parametrize(
    "schema",
    [
        inside(""),
        inside("#"),
        inside("/"),
        inside("json-schema:///"),
        inside("http://x/y", **{"$id": "http://x/y"}),
        inside("y#", **{"$id": "http://x/y"}),
        {"anyOf": [{"$id": "a"}, {"$id": "a"}]},
        {"items": {"$id": "http://x/y", "items": {"$id": ""}}},
    ],
)
def test_two_schemas_with_the_same_id(schema: dict[str, Any]) -> None:
    """Written alike or not."""
    assert has_equal_ids(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"$id": "http://x/y"},
        {"$id": ""},
        inside("b"),
        inside("json-schema:///", **{"$id": "http://x/y"}),
        inside("http://[", **{"$id": "http://x/y"}),
        {"properties": {"$id": {"type": "string"}}, "const": {"$id": ""}, "enum": [{"$id": ""}]},
    ],
)
def test_ids_that_differ(schema: dict[str, Any]) -> None:
    """And what is no id: a property of that name, a value."""
    assert not has_equal_ids(schema)
