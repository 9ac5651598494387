"""Whether some answer of a schema is finite: through every keyword and every way to refer to a schema."""

from typing import Any

import pytest

from kvshare.conversation.schema_ends import can_end

ROOT: dict[str, Any] = {"$ref": "#"}
TEXT = {"type": "string"}


def required(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


@pytest.mark.parametrize(
    "schema",
    [
        required(x=ROOT),
        {**required(x=ROOT), "additionalProperties": False},
        {"type": "array", "items": ROOT, "minItems": 1},
        {"type": "array", "prefixItems": [TEXT, ROOT], "minItems": 2},
        {"type": "array", "items": [TEXT, ROOT], "minItems": 2},
        {"type": "array", "items": [TEXT], "additionalItems": ROOT, "minItems": 2},
        {"type": "array", "contains": ROOT},
        {"type": "object", "required": ["x"], "additionalProperties": ROOT},
        {"type": "object", "minProperties": 1, "additionalProperties": ROOT},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": ROOT, "minItems": 1}}},
        {
            "$ref": "#/definitions/a",
            "definitions": {
                "a": required(b={"$ref": "#/definitions/b"}),
                "b": {"type": "array", "prefixItems": [{"$ref": "#/definitions/a"}], "minItems": 1},
            },
        },
        required(x={"anyOf": [ROOT, {"type": "array", "items": ROOT, "minItems": 2}]}),
        required(x={"oneOf": [ROOT, required(y=ROOT)]}),
        {"allOf": [{"type": "object", "required": ["x"]}, {"properties": {"x": ROOT}}]},
        {**required(x=ROOT), "anyOf": [{"required": ["x"]}, {"required": ["x", "y"]}]},
        {**required(x=ROOT), "type": ["object", "array"], "items": ROOT, "minItems": 3},
        {"$ref": "#n", "$defs": {"n": {"$anchor": "n", **required(next={"$ref": "#n"})}}},
        {"$id": "https://example.com/list", **required(next={"$ref": "https://example.com/list"})},
        {"$ref": "#/$defs/n", "$defs": {"n": {"$id": "node", **required(next={"$ref": "node"})}}},
        required(**{"a~b/c d": required(x={"$ref": "#/properties/a~0b~1c%20d"})}),
        {"type": "object", "properties": {"x": False}, "required": ["x"]},
        {"enum": []},
        {"anyOf": []},
    ],
)
def test_a_schema_whose_answers_contain_answers_without_end(schema: dict[str, Any]) -> None:
    """Every answer contains another one, directly or through other schemas."""
    assert not can_end(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        required(next={"anyOf": [ROOT, {"type": "null"}]}),
        required(children={"type": "array", "items": ROOT}),
        {"type": "object", "properties": {"x": ROOT}},
        {"type": "array", "items": ROOT, "minItems": 0},
        {"type": "array", "prefixItems": [TEXT], "items": ROOT, "minItems": 1},
        {"type": "object", "additionalProperties": ROOT},
        {"type": "object", "minProperties": 1, "properties": {"a": TEXT}, "additionalProperties": ROOT},
        {"type": ["object", "null"], "properties": {"x": ROOT}, "required": ["x"]},
        {"properties": {"x": ROOT}, "required": ["x"]},  # a string follows it
        {"type": "object", "properties": {"x": ROOT}, "anyOf": [{"required": ["x"]}, {"required": ["y"]}]},
        {**required(), "patternProperties": {"^x": TEXT}, "additionalProperties": ROOT, "required": ["x1"]},
        required(x={"const": 1}),
        {"type": "array", "contains": ROOT, "minContains": 0},
        {"$ref": "https://example.com/elsewhere"},
        {"$ref": "#/$defs/missing"},
        {"type": "array", "minItems": 10**12, "items": TEXT},
        {"type": 5, "required": 3, "properties": [], "items": None, "minItems": "x"},
    ],
)
def test_a_schema_with_a_finite_answer(schema: dict[str, Any]) -> None:
    """Some way leads to an end; what is no schema, or lies elsewhere, is for the compiler to refuse."""
    assert can_end(schema)


@pytest.mark.parametrize("link", [lambda ref: required(x=ref), lambda ref: {"allOf": [ref, ref]}])
def test_a_long_chain_of_references_is_followed_to_its_end(link: Any) -> None:
    """In whichever order the schemas stand."""
    size = 2000
    chain = {str(i): link({"$ref": f"#/$defs/{i + 1}"}) for i in range(size)}
    assert can_end({"$ref": "#/$defs/0", "$defs": {**chain, str(size): TEXT}})
    if link({}) != {"allOf": [{}, {}]}:  # a schema that only refers to itself allows anything
        assert not can_end({"$ref": "#/$defs/0", "$defs": {**chain, str(size): {"$ref": "#/$defs/0"}}})
