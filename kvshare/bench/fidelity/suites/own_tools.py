"""The project's own tools, systems.yaml: what a model may call, and how a user asks for it."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvshare.bench.fidelity.suites.library import Source
from kvshare.bench.fidelity.suites.own_forms import Slot, Values

WORDS: Mapping[str, Any] = yaml.safe_load(
    Path(__file__).with_name("systems.yaml").read_text(encoding="utf-8")
)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call, and how a user asks for it."""

    name: str
    description: str
    request: str
    result: str
    arguments: Mapping[str, Slot]

    @classmethod
    def from_yaml(cls, name: str, row: Mapping[str, Any]) -> Tool:
        """As systems.yaml has it."""
        arguments = {argument: Slot.from_yaml(slot) for argument, slot in row["arguments"].items()}
        return cls(name, row["description"], row["request"], row["result"], arguments)

    @property
    def definition(self) -> str:
        """As a system prompt has it."""
        types = {
            name: {"type": "integer"}
            if slot.kind == "number"
            else {"type": "string", "enum": list(slot.options)}
            if slot.options
            else {"type": "string", "description": slot.kind}
            for name, slot in self.arguments.items()
        }
        return json.dumps({"name": self.name, "description": self.description, "parameters": types})

    def call(self, values: Values) -> str:
        """The one right line of JSON for these arguments."""
        arguments = {
            name: int(values[name]) if slot.kind == "number" else values[name]
            for name, slot in self.arguments.items()
        }
        return json.dumps({"name": self.name, "arguments": arguments})

    def values(self, draw: random.Random, taken: Sequence[str] = ()) -> dict[str, str]:
        """A value for each argument."""
        found: dict[str, str] = {}
        for name in self.arguments:
            found = self.changed(found, name, draw, taken)
        return found

    def changed(
        self, values: Values, name: str, draw: random.Random, taken: Sequence[str] = ()
    ) -> dict[str, str]:
        """Another value for this argument."""
        return {**values, name: self.arguments[name].value(draw, [*values.values(), *taken])}


TOOLS: Sequence[Source[Tool]] = [
    Source(f"form:tool-{name}", Tool.from_yaml(name, row)) for name, row in WORDS["tools"].items()
]
