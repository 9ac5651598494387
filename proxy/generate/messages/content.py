"""
The messages of Anthropic's API: content blocks, and how they become a chat's turns.

`cache_control` is not declared, and passes: it asks for what this server does anyway.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field

from proxy.generate.part import Identifier, Part, joined, of_types, text_as
from proxy.generate.turns import Turns

_TEXT_ONLY = "this server reads no images, documents or other blocks"


class TextBlock(Part):
    """Text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(Part):
    """What an assistant thought, legible or not. It is dropped: templates show no earlier thoughts."""

    type: Literal["thinking", "redacted_thinking"]


class ToolUseBlock(Part):
    """An assistant's call of a tool."""

    type: Literal["tool_use"]
    id: Identifier
    name: Identifier
    input: dict[str, Any]


Text = Annotated[
    list[Annotated[TextBlock, BeforeValidator(of_types("text", hint=_TEXT_ONLY))]],
    Field(fail_fast=True),
    text_as("text"),
]


class ToolResultBlock(Part):
    """What a tool answered."""

    type: Literal["tool_result"]
    tool_use_id: Identifier
    content: Text = Field(default_factory=list)
    is_error: bool = False

    @property
    def text(self) -> str:
        """Templates have no field for a failure, so that the text says it."""
        text = joined(self.content)
        return f"Error: {text}" if self.is_error else text


UserBlock = Annotated[
    TextBlock | ToolResultBlock,
    Discriminator("type"),
    BeforeValidator(of_types("text", "tool_result", hint=_TEXT_ONLY)),
]
AssistantBlock = Annotated[
    TextBlock | ThinkingBlock | ToolUseBlock,
    Discriminator("type"),
    BeforeValidator(of_types("text", "tool_use", "thinking", "redacted_thinking", hint=_TEXT_ONLY)),
]


class UserMessage(Part):
    """Text and results of tools."""

    role: Literal["user"]
    content: Annotated[list[UserBlock], Field(fail_fast=True), text_as("text")]

    def add_to(self, turns: Turns, *, at: str) -> None:
        """Raises RequestError for a result of a call that is not there."""
        for number, block in enumerate(self.content):
            if isinstance(block, TextBlock):
                turns.say("user", block.text)
            else:
                turns.result(block.tool_use_id, block.text, param=f"{at}.content[{number}].tool_use_id")


class AssistantMessage(Part):
    """Text, thoughts and calls of tools."""

    role: Literal["assistant"]
    content: Annotated[list[AssistantBlock], Field(fail_fast=True), text_as("text")]

    def add_to(self, turns: Turns, *, at: str) -> None:
        for block in self.content:
            if isinstance(block, TextBlock):
                turns.say("assistant", block.text)
            elif isinstance(block, ToolUseBlock):
                turns.call(block.id, block.name, block.input)


class SystemMessage(Part):
    """Instructions in the middle of a conversation."""

    role: Literal["system"]
    content: Text

    def add_to(self, turns: Turns, *, at: str) -> None:
        turns.say("system", joined(self.content))


Message = Annotated[UserMessage | AssistantMessage | SystemMessage, Discriminator("role")]
