"""Whether some answer of a schema is finite: through every keyword and every way to refer to a schema."""

import time
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
        required(x={"$ref": "json-schema:///"}),
        required(x={"$ref": "json-schema:///#"}),
        {"$id": "http://x/root", **required(x={"$ref": "root#"})},
        {"$id": "http://x/a/root", **required(x={"$ref": "../a/root"})},
        {"$id": "http://x/root", **required(x={"$ref": "HTTP://X/root"})},
        {"$id": "http://x/root", "$ref": "b", "$defs": {"b": {"$id": "b", **required(x={"$ref": "/b"})}}},
        {"$ref": "#/$defs/b", "$defs": {"b": {"$id": "b", **required(x=ROOT)}}},
        {
            "$ref": "#/$defs/b/$defs/c",
            "$defs": {"b": {"$id": "urn:b", "$defs": {"c": required(x={"$ref": "#/$defs/c"})}}},
        },
        {"$id": "http://x/r", "$ref": "r#n", "$defs": {"b": {"$anchor": "n", **required(x={"$ref": "#n"})}}},
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "id": "http://x/r",
            **required(x={"$ref": "/r"}),
        },
        {**required(), "patternProperties": {"^x": ROOT}, "additionalProperties": False, "required": ["x"]},
        {**required(), "patternProperties": {"^x": ROOT}, "additionalProperties": False, "minProperties": 1},
        {
            **required(),
            "properties": {"a": ROOT, "b": ROOT},
            "additionalProperties": False,
            "minProperties": 1,
        },
        {
            **required(a=TEXT),
            "properties": {"a": TEXT, "b": TEXT, "c": ROOT, "d": ROOT},
            "additionalProperties": ROOT,
            "minProperties": 3,
        },
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
        {**required(), "patternProperties": {"^x": ROOT}, "additionalProperties": False},
        {**required(), "patternProperties": {"^x": ROOT, "y": TEXT}, "required": ["y"]},
        {
            **required(),
            "properties": {"a": ROOT, "b": TEXT},
            "additionalProperties": False,
            "minProperties": 1,
        },
        {
            **required(a=TEXT),
            "properties": {"a": TEXT, "b": TEXT, "c": ROOT},
            "additionalProperties": False,
            "minProperties": 2,
        },
        {**required(a=TEXT), "minProperties": 10**12},
        {"$id": "http://x/a", **required(x={"$ref": "b"}), "$defs": {"b": {"$id": "b", **required()}}},
        required(x={"$ref": "#/$defs/b"}) | {"$defs": {"b": {"$id": "b", "properties": {"y": ROOT}}}},
        required(x={"const": 1}),
        {"type": "array", "contains": ROOT, "minContains": 0},
        {"$ref": "https://example.com/elsewhere"},
        {"$ref": "#/$defs/missing"},
        {"type": "array", "minItems": 10**12, "items": TEXT},
        {"type": "json"},
        {"type": ["array", 5], "items": ROOT, "minItems": 1},
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


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "allOf": [{"required": [f"a{i}"]} for i in range(3000)]},
        {"type": "object", "required": ["a"] * 20_000},
        {"type": "array", "minItems": 10**9, "prefixItems": [{}] * 20_000},
        {"type": "object", "minProperties": 9000, "properties": {f"a{i}": {} for i in range(5000)}},
        {"$ref": f"#/{'a/' * 30_000}"},
    ],
)
def test_a_schema_that_is_made_to_take_long(schema: dict[str, Any]) -> None:
    """Some seconds at most, also on a slow machine: it is looked at in the server's own process."""
    began = time.thread_time()
    assert can_end({**schema, "anyOf": [{} for _ in range(5000)]})
    assert time.thread_time() - began < 5
