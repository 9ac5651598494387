"""A chat in the form that a model's template takes. The bodies of all APIs are converted to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class ToolUse(StrEnum):
    """Whether an answer calls tools."""

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
    continue_final_message: bool = False  # the answer continues the last message, an assistant's
    add_generation_prompt: bool = True  # the prompt ends with the beginning of an assistant's message
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def may_call(self) -> bool:
        """Whether the answer may call tools."""
        return bool(self.tools) and self.tool_choice.use is not ToolUse.NONE
