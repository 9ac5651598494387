"""
A chat in the form that a model's template takes, and the parts of its answer as it streams.

The bodies of all APIs are converted to a `Chat`, and their answers are made of `Part`s.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class ToolUse(StrEnum):
    """The rule whether an answer may, or must, call tools."""

    NONE = "none"
    AUTO = "auto"  # the model decides
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`name` is that of the only tool that may be called. If it is set, `use` is REQUIRED."""

    use: ToolUse = ToolUse.AUTO
    name: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Chat:
    """
    Messages in the form that Hugging Face templates read, and everything else that the prompt depends on.

    A message has `role` (system, user, assistant, tool) and `content`, a string. An assistant's may have
    `tool_calls`: `{"id", "type": "function", "function": {"name", "arguments": dict}}`; a tool's has
    `tool_call_id` and `name`. Tools are as OpenAI writes them:
    `{"type": "function", "function": {"name", "description", "parameters": JSON schema}}`.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    answer_schema: Mapping[str, Any] | None = None  # the answer is JSON of this schema; None: any text
    answer_param: str = "response_format"  # where in the request the schema is
    continue_final_message: bool = False  # the answer continues the last message, an assistant's
    add_generation_prompt: bool = True  # the prompt ends with the beginning of an assistant's message
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def may_call(self) -> bool:
        return bool(self.tools) and self.tool_choice.use is not ToolUse.NONE


@dataclass(frozen=True, slots=True)
class Text:
    """More of the text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """A tool call begins; its arguments follow."""

    number: int  # of the calls in this answer, from 0
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    number: int
    text: str


Part = Text | Reasoning | CallBegins | CallArguments
