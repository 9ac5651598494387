"""A chat as a model's template takes it. Every API's body becomes one of these."""

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
    """`name`: of the only tool that may be called; with it `use` is REQUIRED."""

    use: ToolUse = ToolUse.AUTO
    name: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Chat:
    """
    Messages in the shape that Hugging Face templates read, and what else the prompt is made of.

    A message has `role` (system, user, assistant, tool) and `content`, a string. An assistant's may have
    `tool_calls`: `{"id", "type": "function", "function": {"name", "arguments": dict}}`; a tool's has
    `tool_call_id` and `name`. Tools are as OpenAI writes them:
    `{"type": "function", "function": {"name", "description", "parameters": JSON schema}}`.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    answer_schema: Mapping[str, Any] | None = None  # the text is JSON of this schema; None: any text
    continue_final_message: bool = False  # the answer goes on with the last message, an assistant's
    add_generation_prompt: bool = True  # the prompt ends with what begins an assistant's message
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def may_call(self) -> bool:
        """Whether the answer may hold calls of tools."""
        return bool(self.tools) and self.tool_choice.use is not ToolUse.NONE
