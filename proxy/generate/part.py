"""What the bodies of the Messages and the Responses API are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Protocol

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from proxy.generate.fields import INT32, Body, Whole
from proxy.wrong_values import found, invalid

MAX_TOOLS = 1024  # coding agents with many MCP servers send hundreds
_MAX_QUOTED = 40  # characters of a type
_BETWEEN = "\n"

Model = Annotated[str, Field(min_length=1, max_length=256)]
Identifier = Annotated[str, Field(min_length=1, max_length=256)]  # of a call
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
MaxTokens = Annotated[Whole, Field(ge=1, le=INT32)]
Temperature = Annotated[float, Field(ge=0, le=2)]
TopP = Annotated[float, Field(gt=0, le=1)]
Effort = Annotated[str, Field(max_length=32)]


class Part(Body):
    """A body, or a part of one. Null is the same as not there."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}


def of_types(*types: str, default: str | None = None, hint: str) -> Callable[[object], object]:
    """A check of a part's `type`, which is `default` where it is not given; `hint` says the way out."""
    names = " or ".join(f"'{name}'" for name in types)

    def check(part: object) -> object:
        if not isinstance(part, dict):
            return part
        given = part.get("type")
        if given is None and default is not None:
            return {**part, "type": default}
        if given not in types:
            name = "quoted" if isinstance(given, str) else "found"
            words = {name: f"'{given[:_MAX_QUOTED]}'" if isinstance(given, str) else found(given)}
            raise PydanticCustomError("part_type", f"expected type {names}, got {{{name}}}; {hint}", words)
        return part

    return check


def text_as(part_type: str) -> BeforeValidator:
    """A string is short for a list of one part, of this type, with its text."""
    return BeforeValidator(
        lambda content: [{"type": part_type, "text": content}] if isinstance(content, str) else content
    )


class HasText(Protocol):
    """A part of a message that is text."""

    @property
    def text(self) -> str: ...


def joined(parts: Iterable[HasText]) -> str:
    """The text of parts that are paragraphs of one message."""
    return _BETWEEN.join(part.text for part in parts if part.text)


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

    Raises:  RequestError if two have one name, or the chosen, or any that is required, is not there
    """
    if len(set(names)) != len(names):
        raise invalid("tools", "expected names that differ, got one twice")
    if chosen is not None and chosen not in names:
        raise invalid("tool_choice.name", "expected the name of one of 'tools', got another")
    if required and not names:
        raise invalid("tool_choice", "it requires a call, and there are no 'tools' to call")
