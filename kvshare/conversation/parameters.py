"""The parameters of a tool, read from its JSON schema."""

from collections.abc import Mapping
from typing import Any

_DEFINITIONS = ("$defs", "definitions")
_TYPE_NAMES = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    list: "array",
    dict: "object",
}


# Keywords of a schema that may add properties to those that it lists.
_MAY_ADD = {
    *("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames", "minProperties"),
    *("$ref", "$dynamicRef", "$recursiveRef", "anyOf", "oneOf", "allOf", "not", "if", "then", "else"),
    *("enum", "const", "dependencies", "dependentRequired", "dependentSchemas"),
}


def takes_nothing(schema: object) -> bool:
    """
    Return whether a tool with this schema takes no parameters.

    OpenAI: a function without `parameters` has an empty list of them. Clients write the same as a list of
    properties that is empty. Where another keyword says more (`additionalProperties`), or the schema lists no
    properties at all, any object may be meant.
    """
    given = _mapping(schema)
    is_empty = "properties" in given and not given["properties"] and not given.get("required")
    return not given or (is_empty and given.keys().isdisjoint(_MAY_ADD))


class Parameters:
    """The parameters of one tool, in the schema's order. References within the schema are followed."""

    def __init__(self, tool: Mapping[str, Any]) -> None:
        schema = _mapping(_mapping(tool.get("function")).get("parameters"))
        self._definitions = {key: schema[key] for key in _DEFINITIONS if key in schema}
        self._properties = _mapping(schema.get("properties"))
        self.required = frozenset(name for name in _listed(schema.get("required")) if isinstance(name, str))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._properties)

    def schema(self, name: str) -> dict[str, Any]:
        return {**_mapping(self._properties.get(name)), **self._definitions}

    def strings(self, name: str) -> tuple[str, ...]:
        """Return the parameter's values, if the schema lists them and all are strings; else none."""
        values = _values(self._resolved(self._properties.get(name)))
        return tuple(values) if all(isinstance(value, str) for value in values) else ()

    def types(self, name: str) -> frozenset[str]:
        """JSON's names of the types that it may have; empty if the schema does not say."""
        return self._types(self._properties.get(name), depth=0)

    def _types(self, schema_or_ref: object, *, depth: int) -> frozenset[str]:
        if depth > 8:  # a schema may refer to itself
            return frozenset()
        schema = self._resolved(schema_or_ref)
        named = {name for name in _listed(schema.get("type")) if isinstance(name, str)}
        of_values = {_TYPE_NAMES[type(value)] for value in _values(schema) if type(value) in _TYPE_NAMES}
        branches = [branch for key in ("anyOf", "oneOf", "allOf") for branch in _listed(schema.get(key))]
        return frozenset(named or of_values).union(*(self._types(b, depth=depth + 1) for b in branches))

    def _resolved(self, given: object) -> Mapping[str, Any]:
        schema = _mapping(given)
        for _ in range(8):
            reference = schema.get("$ref")
            if not isinstance(reference, str):
                break
            root, _, path = reference.partition("/")
            key, _, name = path.partition("/")
            schema = _mapping(_mapping(self._definitions.get(key)).get(name)) if root == "#" else {}
        return schema


def _values(schema: Mapping[str, Any]) -> list[Any]:
    return [schema["const"]] if "const" in schema else _listed(schema.get("enum"))


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _listed(value: object) -> list[Any]:
    if isinstance(value, list):
        return value
    return [] if value is None else [value]
