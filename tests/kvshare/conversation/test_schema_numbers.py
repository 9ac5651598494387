"""Numbers of schemas as 64-bit floats: kept, moved inwards, or refused; never another number."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshare.conversation.schema_numbers import LARGEST, UnsupportedNumberError, with_exact_numbers

BIG = 1234567890123456789  # more than 53 bits


@pytest.mark.parametrize(
    "schema",
    [
        {"const": 2**53},
        {"enum": [0, -1, 2**60, 1.5, "1234567890123456789", None, True]},
        {"type": "integer", "minimum": -(2**53), "maximum": 2**53},
        {"default": BIG, "examples": [BIG], "title": str(BIG)},
        {"exclusiveMinimum": True, "minimum": 3},
        {"minimum": "3", "maximum": None},
        {"$ref": "#/x/a", "x": {"a": {"$ref": "http://elsewhere/#/default"}}, "$anchor": "b", "default": {}},
    ],
)
def test_numbers_that_floats_hold_stay(schema: dict[str, Any]) -> None:
    """And so does what is no number, or not part of an answer."""
    assert with_exact_numbers(schema) == schema


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"minimum": -(2**63), "maximum": 2**63 - 1}, {"minimum": -LARGEST, "maximum": LARGEST}),
        ({"minimum": 0, "maximum": 2**64 - 1}, {"minimum": 0, "maximum": LARGEST}),
        ({"maximum": 10**400}, {"maximum": LARGEST}),
        ({"minimum": -1e300}, {"minimum": -LARGEST}),
        ({"exclusiveMinimum": -(2**63) - 1}, {"exclusiveMinimum": -LARGEST}),
        (
            {"properties": {"minimum": {"maximum": 2**53 + 1}, "const": {}}},
            {"properties": {"minimum": {"maximum": 2**53}, "const": {}}},
        ),
        ({"anyOf": [{"items": {"minimum": 2**53 + 1}}]}, {"anyOf": [{"items": {"minimum": 2**53 + 2}}]}),
    ],
)
def test_bounds_are_moved_inwards(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    """As those that generators write for 64-bit integers; a property may have the name of a keyword."""
    given_before = repr(schema)
    assert with_exact_numbers(schema) == expected
    assert repr(schema) == given_before


@pytest.mark.parametrize(
    "schema",
    [
        {"const": BIG},
        {"enum": [1, 2**53 + 1]},
        {"const": {"a": [{"b": -BIG}]}},
        {"const": 2**64 - 1},
        {"const": -(2**63)},
        {"const": 1e300},
        {"multipleOf": 2**53 + 1},
        {"minimum": 2**63},
        {"maximum": -(2**63) - 1},
        {"minimum": 10**400},
        {"minimum": BIG, "maximum": BIG + 2},
        {"$defs": {"a": {"properties": {"enum": {"enum": [BIG]}}}}},
    ],
)
def test_numbers_that_would_come_back_as_others_are_refused(schema: dict[str, Any]) -> None:
    """Also deep inside, and below names that are keywords."""
    with pytest.raises(UnsupportedNumberError, match="bits"):
        with_exact_numbers(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/default", "default": {"const": BIG}},
        {"$ref": "#/examples/0", "examples": [{"const": BIG}]},
        {"$ref": "#/x/0/0", "x": [[{"const": BIG}]]},
        {"$ref": "#/$defs", "$defs": {"const": BIG}},
        {"$ref": "#/properties/a/default", "properties": {"a": {"default": {"enum": [BIG]}}}},
        {"$id": "http://x/a", "items": {"$ref": "HTTP://X/a#/d%65fault"}, "default": {"const": BIG}},
    ],
)
def test_a_reference_to_what_is_not_a_schema_is_refused(schema: dict[str, Any]) -> None:
    """Its numbers are not looked at: in a default they are not part of an answer."""
    with pytest.raises(UnsupportedNumberError, match="not a schema"):
        with_exact_numbers(schema)


@given(low=st.integers(-(2**70), 2**70), size=st.integers(0, 2**70))
def test_no_answer_is_outside_of_the_bounds_given(low: int, size: int) -> None:
    """What is left of a range lies in it, and its bounds are floats."""
    try:
        schema = with_exact_numbers({"minimum": low, "maximum": low + size})
    except UnsupportedNumberError:
        return
    assert low <= schema["minimum"] <= schema["maximum"] <= low + size
    assert all(float(bound) == bound and abs(bound) <= LARGEST for bound in schema.values())
    if size >= 2**12 and abs(low) + size < 2**62:
        assert math.isclose(schema["minimum"], low, rel_tol=1e-15, abs_tol=1)
