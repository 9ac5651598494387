"""The tools of a chat body, as `tools` or as the older `functions`, in the form that a `Chat` takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from kvshare.conversation.chat import ToolChoice, ToolUse
from kvshare.errors import RequestError
from proxy.generate.fields import Body, Name
from proxy.request_body import at_most
from proxy.wrong_values import found, invalid

MAX_TOOLS = 512
_ANY = ToolChoice()


class Function(Body):
    """A function that may be called."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the tool in the form that OpenAI documents; without parameters it takes an empty object."""
        function = self.model_dump(include={"name", "description", "strict"}, exclude_none=True)
        parameters = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": {**function, "parameters": parameters}}


class ChatTool(Body):
    """One tool. OpenAI's own, such as "web_search", run on its servers only."""

    type: Literal["function"]
    function: Function


Tools = Annotated[list[ChatTool], at_most(MAX_TOOLS)]
Functions = Annotated[list[Function], at_most(MAX_TOOLS)]


def read_tools(
    tools: Sequence[ChatTool] | None,
    tool_choice: object,
    functions: Sequence[Function] | None,
    function_call: object,
) -> tuple[tuple[Mapping[str, Any], ...], ToolChoice]:
    """
    The tools of a body and whether the answer may or must call them.

    Raises:  RequestError if a choice has no known form, or names a tool that is not there
    """
    if tools and functions:
        raise RequestError("Send 'tools' or the older 'functions', not both.", param="functions")
    if not functions:
        _refuse_orphan("function_call", function_call, "functions")
    if not functions and not tools:
        _refuse_orphan("tool_choice", tool_choice, "tools")
        return (), _ANY
    offered = functions or [tool.function for tool in tools or ()]
    param, asked = ("function_call", function_call) if functions else ("tool_choice", tool_choice)
    choice, allowed = _read_choice(param, asked, frozenset(function.name for function in offered))
    return tuple(each.for_template() for each in offered if functions or each.name in allowed), choice


def _refuse_orphan(param: str, choice: object, tools: str) -> None:
    if choice not in (None, "none", "auto"):
        raise RequestError(f"'{param}' asks for a call, which needs '{tools}'.", param=param)


def _read_choice(param: str, choice: object, names: frozenset[str]) -> tuple[ToolChoice, frozenset[str]]:
    """The choice among the tools of these names, and the names of those among which it is."""
    if choice is None:
        return _ANY, names
    if isinstance(choice, str) and choice in set(ToolUse):
        return ToolChoice(ToolUse(choice)), names
    if isinstance(choice, dict):
        if choice.get("type") == "allowed_tools":
            return _allowed(param, choice.get("allowed_tools"), names)
        if choice.get("type", "function") == "function":
            at = f"{param}.function" if "function" in choice else param
            name = _chosen(f"{at}.name", choice.get("function", choice), names)
            return ToolChoice(ToolUse.REQUIRED, name), names
    expected = "expected 'none', 'auto', 'required' or an object that names a function"
    raise invalid(param, f"{expected}, got {found(choice)}")


def _allowed(param: str, allowed: object, names: frozenset[str]) -> tuple[ToolChoice, frozenset[str]]:
    """Some of the tools, all of them in the prompt's place."""
    param = f"{param}.allowed_tools"
    mode = allowed.get("mode", "auto") if isinstance(allowed, dict) else None
    entries = allowed.get("tools") if isinstance(allowed, dict) else None
    if mode not in ("auto", "required") or not isinstance(entries, list) or not entries:
        expected = "an object with 'mode' ('auto' or 'required') and 'tools', a list of functions"
        raise invalid(param, f"expected {expected}")
    functions = [entry.get("function") if isinstance(entry, dict) else entry for entry in entries]
    chosen = [_chosen(f"{param}.tools[{number}]", each, names) for number, each in enumerate(functions)]
    return ToolChoice(ToolUse(mode)), frozenset(chosen)


def _chosen(param: str, function: object, names: frozenset[str]) -> str:
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise invalid(param, "expected the name of a function")
    if name not in names:
        raise invalid(param, "no function of the body has this name")
    return name
