"""The project's own tools, systems.yaml: functions that a model may call, and how a user asks for them."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvshare.bench.fidelity.suites.library import Source
from kvshare.bench.fidelity.suites.own_forms import Slot, Values, refilled
from kvshare.bench.fidelity.texts import texts_beside

WORDS = texts_beside(__file__, "systems.yaml")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call, and how a user asks for it."""

    name: str
    description: str
    request: str
    result: str
    arguments: Mapping[str, Slot]

    @property
    def definition(self) -> str:
        """One line of JSON, for the system prompt."""
        types = {name: _type_of(slot) for name, slot in self.arguments.items()}
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
        return refilled(self.arguments, self.arguments, draw, taken=taken)

    def changed(
        self, values: Values, name: str, draw: random.Random, taken: Sequence[str] = ()
    ) -> dict[str, str]:
        """The same values with another one for this argument."""
        return refilled(self.arguments, [name], draw, values=values, taken=taken)


def _type_of(slot: Slot) -> dict[str, Any]:
    if slot.kind == "number":
        return {"type": "integer"}
    return {"type": "string", **({"enum": slot.options} if slot.options else {"description": slot.kind})}


def _tool(name: str, row: Mapping[str, Any]) -> Tool:
    """A tool of systems.yaml, whose keys are the fields of these classes."""
    arguments = {argument: Slot(**slot) for argument, slot in row["arguments"].items()}
    return Tool(name=name, **{**row, "arguments": arguments})


TOOLS = [Source(f"form:tool-{name}", _tool(name, row)) for name, row in WORDS["tools"].items()]
