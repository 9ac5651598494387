"""How a model writes calls of tools, found in its chat template; a system block for templates without tools."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from kvshare.conversation.chat import Chat

ChatTemplate = str | Mapping[str, str] | None  # Hugging Face: one template, several by name, or none


class ToolFormat(StrEnum):
    """How a model writes the calls of tools in its answer."""

    HERMES = "hermes"  # <tool_call>{"name": .., "arguments": {..}}</tool_call>
    LLAMA3_JSON = "llama3_json"  # {"name": .., "parameters": {..}}, the whole answer
    MISTRAL = "mistral"  # [TOOL_CALLS][{"name": .., "arguments": {..}}], or [TOOL_CALLS]name[ARGS]{..}
    QWEN_XML = "qwen_xml"  # <tool_call><function=name><parameter=key>value</parameter></function></tool_call>


def tool_format(chat_template: ChatTemplate) -> ToolFormat:
    """The format that the template asks the model for; HERMES where it asks for none."""
    raise NotImplementedError


def takes_tools(chat_template: ChatTemplate) -> bool:
    """Whether the template puts `tools` into the prompt."""
    raise NotImplementedError


def with_tool_block(chat: Chat) -> Chat:
    """The same chat without tools and tool messages, for templates that know only system, user, assistant."""
    raise NotImplementedError
