"""
Finds JSON schemas whose answers cannot end: if every answer contains another answer of the same schema, none
is finite.

The schemas of a document and their references are a graph of conditions: all of some, or any of some, must
be able to end. What can end is found from the leaves upwards (as in Horn clauses), in time linear in the
graph, whose size is limited. Keywords that are on one object, by `allOf` or `$ref`, are read together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvshare.conversation.schema_references import References

NO_END = "no answer follows it, or each answer would contain another one, without end"  # why it is refused
_MAX_STEPS = 300_000  # beyond them the answer is not looked for; compiling has its own limits
_CONTAINERS = frozenset(("object", "array"))
_SCALARS = frozenset(("string", "number", "integer", "boolean", "null"))

# A schema, and whether its `anyOf` and `oneOf` still have to be read.
_Member = tuple[Any, bool]


def can_end(schema: Mapping[str, Any]) -> bool:
    """Return whether some answer is finite. Unclear cases, such as references to elsewhere, count as yes."""
    graph = _Graph(schema)
    try:
        start = graph.conjunction([(schema, True)])
        graph.expand()
    except _TooLarge:
        return True
    return start in graph.ending()


class _TooLarge(Exception):
    pass


@dataclass(slots=True)
class _Condition:
    """Ends if so many of `needs` do; None: all."""

    at_least: int | None = None
    needs: list[int] = field(default_factory=list)


class _Graph:
    """The conditions of one document, by number."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._references = References(root)
        self._conditions: list[_Condition] = []
        self._numbers: dict[frozenset[tuple[int, bool]], int] = {}
        self._waiting: list[tuple[int, list[_Member]]] = []
        self._steps = 0

    def conjunction(self, members: Sequence[_Member]) -> int:
        """Return the number of the condition that one value follows all of these schemas."""
        key = frozenset((id(schema), reads_choices) for schema, reads_choices in members)
        if key not in self._numbers:
            self._numbers[key] = self._new(_Condition())
            self._waiting.append((self._numbers[key], list(members)))
        return self._numbers[key]

    def expand(self) -> None:
        """Find what each condition needs. Raises _TooLarge."""
        while self._waiting:
            number, members = self._waiting.pop()
            self._conditions[number].needs = self._needs(members)

    def ending(self) -> set[int]:
        """Return the conditions that can be met by something finite."""
        missing = [len(each.needs) if each.at_least is None else each.at_least for each in self._conditions]
        users: list[list[int]] = [[] for _ in self._conditions]
        for number, condition in enumerate(self._conditions):
            for need in condition.needs:
                users[need].append(number)
        ended = {number for number, count in enumerate(missing) if not count}
        waiting = list(ended)
        while waiting:
            for user in users[waiting.pop()]:
                missing[user] -= 1
                if missing[user] <= 0 and user not in ended:
                    ended.add(user)
                    waiting.append(user)
        return ended

    def _new(self, condition: _Condition) -> int:
        self._count()
        self._conditions.append(condition)
        return len(self._conditions) - 1

    def _any(self, needs: list[int]) -> int:
        return self._new(_Condition(at_least=1, needs=needs))

    def _count(self, steps: int = 1) -> None:
        self._steps += steps
        if self._steps > _MAX_STEPS:
            raise _TooLarge

    def _needs(self, members: Sequence[_Member]) -> list[int]:
        flat, choices = self._flattened(members)
        if any(schema is False for schema in flat):
            return [self._any([])]
        objects = [schema for schema in flat if isinstance(schema, dict)]
        listed = [schema["enum"] for schema in objects if isinstance(schema.get("enum"), list)]
        if listed or any("const" in schema for schema in objects):
            return [] if all(listed) else [self._any([])]
        base: list[_Member] = [(schema, False) for schema in objects]
        self._count(len(base) * sum(map(len, choices)))
        needs = [self._any([self.conjunction([*base, (each, True)]) for each in ways]) for ways in choices]
        types = _types(objects)
        if types & _SCALARS:
            return needs
        ways = []
        if "object" in types:
            ways.append(self._new(_Condition(needs=list(self._object_needs(objects)))))
        if "array" in types:
            ways.append(self._new(_Condition(needs=list(self._array_needs(objects)))))
        return [*needs, self._any(ways)]

    def _flattened(self, members: Sequence[_Member]) -> tuple[list[Any], list[Sequence[Any]]]:
        """Everything that the value must follow, through `allOf` and `$ref`, and the choices that it has."""
        flat: list[Any] = []
        choices: list[Sequence[Any]] = []
        waiting, seen = list(members), set()
        while waiting:
            schema, reads_choices = waiting.pop()
            if id(schema) in seen:
                continue
            seen.add(id(schema))
            flat.append(schema)
            if not isinstance(schema, dict):
                self._count()
                continue
            self._count(1 + sum(len(each) for each in schema.values() if isinstance(each, list | dict)))
            if isinstance(schema.get("allOf"), list):
                waiting += [(each, reads_choices) for each in schema["allOf"]]
            waiting += [(each, reads_choices) for each in self._references.targets(schema)]
            if reads_choices:
                choices += [schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)]
        return flat, choices

    def _object_needs(self, schemas: Sequence[Mapping[str, Any]]) -> Iterator[int]:
        """Yield a condition for each property that must be there."""
        required = {name for schema in schemas for name in _names(schema.get("required"))}
        for name in required:
            yield self._property(schemas, name)
        fewest = max((_count_of(schema, "minProperties") for schema in schemas), default=0)
        optional = {name for schema in schemas for name in _mapping(schema.get("properties"))} - required
        if (more := min(fewest - len(required), len(optional) + 1)) > 0:
            yield self._some_of(schemas, optional, more)

    def _some_of(self, schemas: Sequence[Mapping[str, Any]], optional: Iterable[str], count: int) -> int:
        """So many further properties: each optional one once, and as many others as needed."""
        other = self._property(schemas, None)
        self._count(count)
        needs = [*(self._property(schemas, name) for name in optional), *([other] * count)]
        return self._new(_Condition(at_least=count, needs=needs))

    def _property(self, schemas: Sequence[Mapping[str, Any]], name: str | None) -> int:
        """Return the condition of the value of a property; None: of one that no schema names."""
        self._count(len(schemas))
        needs = []
        named: list[_Member] = []
        for schema in schemas:
            properties, others = _mapping(schema.get("properties")), schema.get("additionalProperties", True)
            if name is not None and name in properties:
                named.append((properties[name], True))
            elif patterns := _mapping(schema.get("patternProperties")):  # whichever of them the name matches
                ways = [*patterns.values(), others]
                needs.append(self._any([self.conjunction([(each, True)]) for each in ways]))
            else:
                named.append((others, True))
        return self._new(_Condition(needs=[self.conjunction(named), *needs]))

    def _array_needs(self, schemas: Sequence[Mapping[str, Any]]) -> Iterator[int]:
        """Yield a condition for each kind of item that must be there."""
        fewest = max((_count_of(schema, "minItems") for schema in schemas), default=0)
        heads = [_head_and_rest(schema) for schema in schemas]
        longest = max((len(head) for head, _ in heads), default=0)
        for place in range(min(fewest, longest + 1)):
            self._count(len(heads))
            items = [head[place] if place < len(head) else rest for head, rest in heads]
            yield self.conjunction([(each, True) for each in items])
        for schema in schemas:
            if "contains" in schema and schema.get("minContains", 1) != 0:
                yield self.conjunction([(schema["contains"], True)])


def _types(schemas: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """Return the types that a value of all these schemas may have. What is not a type counts as any."""
    types = _CONTAINERS | _SCALARS
    for schema in schemas:
        kinds = schema.get("type")
        if isinstance(kinds, str):
            kinds = [kinds]
        if isinstance(kinds, list) and all(each in _CONTAINERS | _SCALARS for each in map(str, kinds)):
            known = frozenset(map(str, kinds))
            types &= known | {"integer"} if "number" in known else known
    return types


def _head_and_rest(schema: Mapping[str, Any]) -> tuple[Sequence[Any], Any]:
    head, items = schema.get("prefixItems"), schema.get("items", True)
    if isinstance(items, list):  # of drafts before 2020
        return items, schema.get("additionalItems", True)
    return (head if isinstance(head, list) else ()), items


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _names(value: object) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def _count_of(schema: Mapping[str, Any], key: str) -> int:
    value = schema.get(key)
    return int(value) if isinstance(value, int | float) and 0 < value < float("inf") else 0
