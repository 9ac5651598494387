"""What the bodies of the Messages and the Responses API are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from kvshare.errors import RequestError
from proxy.generate.fields import INT32, Body, Whole
from proxy.wrong_values import found

MAX_TOOLS = 1024  # coding agents with many MCP servers send hundreds
_MAX_QUOTED = 40  # characters of a type

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
        raise RequestError("Invalid 'tools': expected names that differ, got one twice.", param="tools")
    if chosen is not None and chosen not in names:
        message = "Invalid 'tool_choice.name': expected the name of one of 'tools', got another."
        raise RequestError(message, param="tool_choice.name")
    if required and not names:
        message = "Invalid 'tool_choice': it requires a call, and there are no 'tools' to call."
        raise RequestError(message, param="tool_choice")
