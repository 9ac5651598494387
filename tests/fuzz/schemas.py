"""
Makes JSON schemas as clients might write them: most are small and valid, some have odd types, and a few cost
whoever compiles them all that they may.

The same seed makes the same schemas.
"""

from __future__ import annotations

import random
from typing import Any

_EDGES: list[int | float] = [
    sign * (2**bits + near) for sign in (1, -1) for bits in (31, 53, 63, 64) for near in range(-3, 4)
]
_SMALL: list[int | float] = [0, 1, -1, 2, 3, 7, 10, -10, 100, 1000]
_FLOATS: list[int | float] = [0.5, -0.5, 1.5, 0.1, -2.25, 1e-9, 1e15, 1e22, -1e300, 5e-324, 3.0]
_COUNTS = [0, 1, 2, 3, 5]
_EDGE_COUNTS = [10, 100, 10_000, 2**31, 2**32 + 1, 2**63, -1, 2.0, 2.5]
_NAMES = ["a", "b", "name", "größe", "x y", 'quo"te', "back\\slash", "", "$ref", "minimum", "type", "naïve🙂"]
_TEXTS = ["", "a", "yes", "no", "1234567890123456789", "ä", "🙂", 'say "hi"', "line\nbreak", "\\", "null"]
_PATTERNS = [
    "^[a-z]+$",
    "^a{2,5}$",
    "[0-9]{3}",
    "^(ab|c)*$",
    r"^\d{4}-\d{2}$",
    "^$",
    "a|b",
    ".",
    r"^\w{1,8}$",
]
_ODD_PATTERNS = ["(", "(?=a)", r"\p{Lu}+", "^(a{1,1000}){1,1000}$", "(?<n>a)", "[", r"\bword\b", "(a*)*b"]
_FORMATS = [
    "date",
    "date-time",
    "time",
    "email",
    "uuid",
    "ipv4",
    "ipv6",
    "uri",
    "hostname",
    "unknown",
    "int64",
]
_TYPES = ["string", "integer", "number", "boolean", "null", "array", "object"]
_ODD_VALUES = [None, True, -1, 1.5, "x", [], {}, [1], {"a": 1}, 2**70, ["string", 5], ""]
_KEYWORDS = [
    *(
        "type",
        "properties",
        "required",
        "items",
        "prefixItems",
        "enum",
        "const",
        "minimum",
        "maximum",
        "anyOf",
    ),
    *(
        "allOf",
        "oneOf",
        "$ref",
        "pattern",
        "format",
        "minItems",
        "maxLength",
        "additionalProperties",
        "not",
        "$id",
    ),
    *("multipleOf", "patternProperties", "minProperties", "contains", "if", "then", "$defs", "definitions"),
    *("x-guidance", "exclusiveMinimum", "dependentRequired", "propertyNames", "uniqueItems", "$anchor"),
]
_ODD_SHARE = 0.12
_HOSTILE_SHARE = 0.02


class Schemas:
    """An endless supply of them."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def next(self) -> dict[str, Any]:
        """One schema, and often not the only one of its kind."""
        chance = self._random.random()
        if chance < _HOSTILE_SHARE:
            return self._hostile()
        schema = self._any(depth=self._random.choice((0, 1, 1, 2, 2, 3)))
        if chance < _HOSTILE_SHARE + 0.1:
            schema = self._with_references(schema)
        if chance > 1 - _ODD_SHARE:
            self._spoil(schema)
        return schema

    def _any(self, depth: int) -> dict[str, Any]:
        """A schema with others inside, so many levels of them at most."""
        leaves = [self._integer, self._number, self._string, self._values, self._plain]
        makers = (
            leaves if depth <= 0 else [*leaves, *(3 * [self._object]), self._array, self._array, self._union]
        )
        maker: Any = self._random.choice(makers)
        made: dict[str, Any] = maker() if maker in leaves else maker(depth - 1)
        return made

    def _plain(self) -> dict[str, Any]:
        types = self._random.sample(_TYPES, self._random.choice((1, 1, 1, 2, 3)))
        return {"type": types[0] if len(types) == 1 else types}

    def _bound(self) -> int | float:
        kinds: tuple[list[int | float], ...] = (_SMALL, _SMALL, _SMALL, _EDGES, _FLOATS)
        return self._random.choice(self._random.choice(kinds))

    def _integer(self) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "integer"}
        return (
            schema
            | self._bounds()
            | self._some(0.1, format=["int32", "int64", "uint64"], multipleOf=[2, 3, 10])
        )

    def _number(self) -> dict[str, Any]:
        return (
            {"type": "number"}
            | self._bounds()
            | self._some(0.1, multipleOf=[0.5, 0.01, 5], format=["double"])
        )

    def _bounds(self) -> dict[str, Any]:
        names = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
        return {name: self._bound() for name in names if self._random.random() < 0.3}

    def _string(self) -> dict[str, Any]:
        more = self._some(0.2, minLength=self._counts(), maxLength=self._counts(), format=_FORMATS)
        return {"type": "string"} | more | self._some(0.15, pattern=_PATTERNS)

    def _values(self) -> dict[str, Any]:
        values = [self._value() for _ in range(self._random.choice((1, 1, 2, 3, 20)))]
        return {"const": values[0]} if self._random.random() < 0.3 else {"enum": values}

    def _value(self) -> Any:
        given = self._random.choice(
            [self._bound(), self._bound(), self._random.choice(_TEXTS), None, True, False, [1, "a"], {"a": 1}]
        )
        return [given, self._bound()] if self._random.random() < 0.05 else given

    def _counts(self) -> list[Any]:
        return _COUNTS if self._random.random() < 0.95 else _EDGE_COUNTS

    def _object(self, depth: int) -> dict[str, Any]:
        names = self._random.sample(_NAMES, self._random.choice((0, 1, 2, 2, 3, 5)))
        schema: dict[str, Any] = {"type": "object", "properties": {name: self._any(depth) for name in names}}
        if self._random.random() < 0.7:
            schema["required"] = [name for name in names if self._random.random() < 0.8]
        if self._random.random() < 0.6:
            schema["additionalProperties"] = self._random.choice((False, False, self._any(0)))
        schema |= self._some(0.03, minProperties=self._counts(), maxProperties=self._counts())
        if self._random.random() < 0.03:
            schema["patternProperties"] = {self._random.choice(_PATTERNS): self._any(0)}
        return schema

    def _array(self, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "array", "items": self._any(depth)}
        if self._random.random() < 0.15:
            schema["prefixItems"] = [self._any(depth) for _ in range(self._random.choice((1, 2)))]
        return schema | self._some(0.3, minItems=self._counts(), maxItems=self._counts())

    def _union(self, depth: int) -> dict[str, Any]:
        name = self._random.choice(("anyOf", "anyOf", "oneOf", "allOf"))
        return {name: [self._any(depth) for _ in range(self._random.choice((1, 2, 3)))]}

    def _some(self, chance: float, **values: list[Any]) -> dict[str, Any]:
        return {
            name: self._random.choice(of) for name, of in values.items() if self._random.random() < chance
        }

    def _with_references(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Definitions that refer to each other, in a circle or not, by pointers and anchors."""
        place = self._random.choice(("$defs", "definitions"))
        names = [f"d{number}" for number in range(self._random.choice((1, 2, 3, 8, 40)))]
        made = {name: self._referring(self._pointer(place, names)) for name in names}
        for name in names:
            if self._random.random() < 0.2:
                made[name]["$anchor"] = f"at-{name}"
        start = self._pointer(place, names)
        return {**self._random.choice((schema, {}, {})), "$ref": start, place: made}

    def _pointer(self, place: str, names: list[str]) -> str:
        name = self._random.choice(names)
        return self._random.choice(
            (f"#/{place}/{name}", f"#/{place}/{name}", f"#at-{name}", "#", "#/nowhere")
        )

    def _referring(self, pointer: str) -> dict[str, Any]:
        inner = {"$ref": pointer}
        ways: list[dict[str, Any]] = [
            {"type": "array", "items": inner, "minItems": 1},
            {"type": "array", "items": inner, "maxItems": 3},
            {"type": "object", "properties": {"x": inner}, "required": ["x"], "additionalProperties": False},
            {"type": "object", "properties": {"x": inner, "y": self._any(0)}, "additionalProperties": False},
            {"anyOf": [inner, {"type": "null"}]},
            {"oneOf": [inner, self._any(0)]},
            {"allOf": [inner]},
            inner,
            self._any(1),
        ]
        return dict(self._random.choice(ways))

    def _spoil(self, schema: dict[str, Any]) -> None:
        """Give a keyword, somewhere, a value of any type."""
        places = [schema]
        for each in places:  # grows meanwhile
            places += [value for value in each.values() if isinstance(value, dict)]
        odd = self._random.choice(_ODD_VALUES)
        self._random.choice(places)[self._random.choice(_KEYWORDS)] = odd
        if self._random.random() < 0.3:
            self._random.choice(places)["pattern"] = self._random.choice(_ODD_PATTERNS)

    def _hostile(self) -> dict[str, Any]:
        large = self._random.choice((2**20, 2**31, 2**40, 2**53, 2**63))
        few, many = self._random.randint(2, 5), self._random.choice((30, 200, 2000))
        lowest = -(2**63)
        ways: list[dict[str, Any]] = [
            {"type": "integer", "minimum": lowest, "maximum": lowest + few},
            {"type": "integer", "exclusiveMinimum": lowest - 1, "exclusiveMaximum": lowest + few},
            {"type": "integer", "multipleOf": large},
            {"type": "integer", "allOf": [{"multipleOf": prime} for prime in (99991, 99989, 99971)]},
            {"type": "number", "multipleOf": 1 / large},
            {"type": "array", "minItems": large, "items": {"enum": [1]}},
            {
                "type": "array",
                "minItems": many,
                "items": {"type": "array", "minItems": many, "items": {"enum": [1]}},
            },
            {"type": "array", "maxItems": large},
            {"type": "object", "minProperties": large},
            {"type": "string", "minLength": large, "maxLength": large + 1},
            {"type": "string", "pattern": f"^((a{{1,{many}}}){{1,{many}}}){{1,{many}}}$"},
            {"type": "string", "pattern": f"^(.|a)*b.{{{many}}}$"},
            {"type": "string", "pattern": "(" * many + "a" + ")*" * many},
            {"enum": [f"{number} " * few for number in range(many)]},
            self._doubling("anyOf", 24),
            self._doubling("allOf", 24),
            self._nested(min(many, 150)),
            self._wide(many),
        ]
        hostile = self._random.choice(ways)
        return {**hostile, "title": str(self._random.random())} if self._random.random() < 0.5 else hostile

    def _doubling(self, keyword: str, num_levels: int) -> dict[str, Any]:
        """Each definition has the next one twice: 2^levels, if each is written out."""
        made: dict[str, Any] = {f"d{num_levels}": {"type": "object", "properties": {"z": {"type": "string"}}}}
        for level in range(num_levels):
            inner = {"$ref": f"#/$defs/d{level + 1}"}
            made[f"d{level}"] = {
                keyword: [
                    {"type": "object", "properties": {name: inner}, "required": [name]} for name in ("x", "y")
                ]
            }
        return {"$ref": "#/$defs/d0", "$defs": made}

    def _nested(self, num_levels: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "string"}
        for _ in range(num_levels):
            schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
        return schema

    def _wide(self, num: int) -> dict[str, Any]:
        """Optional properties in any number."""
        return {"type": "object", "properties": {f"p{number}": self._any(0) for number in range(num)}}
