"""Requests and answers of Anthropic's Messages API."""

from __future__ import annotations

import json
from typing import Any

from anthropic.types import TextBlock, ToolParam, ToolUseBlock
from anthropic.types.beta import BetaTextBlock

MESSAGES = "/v1/messages"
ASK: dict[str, Any] = {
    "model": "echo",
    "max_tokens": 400,
    "messages": [{"role": "user", "content": "hello"}],
}


def tool(name: str) -> ToolParam:
    schema: dict[str, object] = {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    }
    return {"name": name, "description": f"The {name} of a city", "input_schema": schema}


def call_text(name: str, city: str) -> str:
    """A call as the fake engine's model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {'city': city}})}\n</tool_call>"


TOOLS: list[ToolParam] = [{**tool("weather"), "cache_control": {"type": "ephemeral"}}, tool("time")]
ONE = call_text("weather", "Paris")
TWO = f"{ONE}\n{call_text('time', 'Lyon')}"


def text_of(block: object) -> str:
    assert isinstance(block, TextBlock | BetaTextBlock)
    return block.text


def use_of(block: object) -> ToolUseBlock:
    assert isinstance(block, ToolUseBlock)
    return block
