"""
The parts of bodies of the Messages and the Responses API, and how they become the messages of a `Chat`: their
format differs from that of templates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from proxy.generate.fields import INT32, Body, Whole
from proxy.wrong_values import found, invalid, wrong

MAX_TOOLS = 1024  # coding agents with many MCP servers send hundreds
NO_CALL = "no call before it has this id; send the call along with its result"
_MAX_QUOTED = 40  # characters of a type

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
MaxTokens = Annotated[Whole, Field(ge=1, le=INT32)]
Temperature = Annotated[float, Field(ge=0, le=2)]
TopP = Annotated[float, Field(gt=0, le=1)]
Effort = Annotated[str, Field(max_length=32)]


class BodyPart(Body):
    """A body, or a part of one. Null is the same as not there."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}


def check_type(*types: str, default: str | None = None, hint: str) -> Callable[[object], object]:
    """A check of a part's `type`, which is `default` where it is not given. `hint`: what to do instead."""
    names = " or ".join(f"'{name}'" for name in types)

    def check(part: object) -> object:
        if not isinstance(part, dict):
            return part
        kind = part.get("type")
        if kind is None and default is not None:
            return {**part, "type": default}
        if kind not in types:
            name = "quoted" if isinstance(kind, str) else "found"
            words = {name: f"'{kind[:_MAX_QUOTED]}'" if isinstance(kind, str) else found(kind)}
            raise PydanticCustomError("part_type", f"expected type {names}, got {{{name}}}; {hint}", words)
        return part

    return check


def text_as(part_type: str) -> BeforeValidator:
    """A plain string means a list with one part of this type."""
    return text_or_list(lambda text: {"type": part_type, "text": text})


def text_or_list(entry_of: Callable[[str], object]) -> BeforeValidator:
    """A plain string means a list with one entry."""

    def listed(value: object) -> object:
        if not isinstance(value, str | list):
            raise wrong("a string or a list", value)
        return [entry_of(value)] if isinstance(value, str) else value

    return BeforeValidator(listed)


def joined(texts: Iterable[str]) -> str:
    return "\n".join(filter(None, texts))


def template_tool(
    name: str, description: str | None, parameters: Mapping[str, Any], *, strict: bool
) -> dict[str, Any]:
    """A tool as chats have it; what is not given is not in the prompt. `strict`: calls follow the schema."""
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    function["parameters"] = parameters
    if strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def check_tools(names: Sequence[str], *, chosen: str | None, required: bool) -> None:
    """
    The tools of a body by their names, against its `tool_choice`.

    Raises:  RequestError for duplicate names, an unknown chosen tool, or a required call without tools
    """
    if len(set(names)) != len(names):
        raise invalid("tools", "expected names that differ, got one twice")
    if chosen is not None and chosen not in names:
        raise invalid("tool_choice.name", "expected the name of one of 'tools', got another")
    if required and not names:
        raise invalid("tool_choice", "it requires a call, and there are no 'tools' to call")


class MessageTurns:
    """
    Messages in the shape of `Chat.messages`, turn by turn.

    Neighbours of one role become one message: most templates want users and assistants in turns, and one
    system message.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}  # of the tools that were called, by call id

    def add_text(self, role: str, text: str) -> None:
        """`role`: system, user or assistant."""
        message = self._turn_of(role)
        message["content"] = joined((message["content"], text))

    def call(self, call_id: str, name: str, arguments: Mapping[str, Any]) -> None:
        self._names[call_id] = name
        function = {"name": name, "arguments": dict(arguments)}
        calls = self._turn_of("assistant").setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def result(self, call_id: str, text: str, *, param: str) -> None:
        """Add what the tool answered. Raises RequestError for `param` if no such call came before."""
        if call_id not in self._names:
            raise invalid(param, NO_CALL)
        name = self._names[call_id]
        self.messages.append({"role": "tool", "tool_call_id": call_id, "name": name, "content": text})

    def check_complete(self, *, param: str) -> None:
        """Raises RequestError for `param` if there are no messages, or the last one calls tools."""
        if not self.messages:
            raise invalid(param, "expected a message with text")
        if "tool_calls" in self.messages[-1]:
            raise invalid(param, "the last message calls tools; send their results, too")

    def _turn_of(self, role: str) -> dict[str, Any]:
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": ""})
        return self.messages[-1]
