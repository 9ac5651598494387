"""What a tool's schema says of each parameter."""

from typing import Any

import pytest

from kvshare.conversation.parameters import Parameters
from tests.kvshare.conversation.answers import WEATHER_SCHEMA, tool


def of(schema: object, **more: object) -> Parameters:
    """The parameters of a tool with one parameter, `a`."""
    return Parameters(tool("f", {"type": "object", "properties": {"a": schema}} | more))


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "integer"}, {"integer"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"anyOf": [{"type": "object"}, {"type": "null"}]}, {"object", "null"}),
        ({"allOf": [{"$ref": "#/$defs/A"}]}, {"array"}),
        ({"$ref": "#/$defs/B"}, {"array"}),
        ({"$ref": "#/$defs/Loop"}, set()),
        ({"$ref": "https://example.com/schema"}, set()),
        (
            {"enum": ["C", 1, 1.5, True, None, [], {}]},
            {"string", "integer", "number", "boolean", "null", "array", "object"},
        ),
        ({"const": 3}, {"integer"}),
        ({}, set()),
        (True, set()),
        ({"type": 3, "anyOf": "x", "enum": None}, set()),
    ],
)
def test_types(schema: object, types: set[str]) -> None:
    """By name, by reference, by the values that are listed; a strange schema says nothing."""
    definitions = {
        "A": {"type": "array"},
        "B": {"$ref": "#/$defs/A"},
        "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}]},
    }
    assert of(schema, **{"$defs": definitions}).types("a") == types


def test_strings() -> None:
    """Listed values, if all of them are strings."""
    assert of({"enum": ["C", "F"]}).strings("a") == ("C", "F")
    assert of({"const": "C"}).strings("a") == ("C",)
    assert of({"enum": ["C", 1]}).strings("a") == ()
    assert of({"type": "string"}).strings("a") == ()


def test_a_schema_alone_is_complete() -> None:
    """It has the definitions that it may refer to."""
    parameters = Parameters(tool("weather", WEATHER_SCHEMA))
    assert parameters.names == ("city", "days", "unit", "hourly", "place")
    assert parameters.required == {"city"}
    assert parameters.schema("place") == {"$ref": "#/$defs/Place", "$defs": WEATHER_SCHEMA["$defs"]}


@pytest.mark.parametrize(
    "parameters", [None, True, {}, {"properties": []}, {"properties": None, "required": None}]
)
def test_a_tool_without_parameters(parameters: Any) -> None:
    """There is nothing to say of any."""
    empty = Parameters(tool("f", parameters))
    assert empty.names == ()
    assert empty.required == frozenset()
    assert empty.types("a") == frozenset()
