"""Tools as clients send them, and calls as a model writes them."""

from __future__ import annotations

import json

from openai.types.chat import (
    ChatCompletionFunctionToolParam,
    ChatCompletionMessageParam,
)
from openai.types.shared_params import FunctionDefinition

CHAT = "/v1/chat/completions"


def function(name: str) -> FunctionDefinition:
    parameters: dict[str, object] = {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    }
    return {"name": name, "description": f"The {name} of a city", "parameters": parameters}


def tool(name: str) -> ChatCompletionFunctionToolParam:
    return {"type": "function", "function": function(name)}


def call_text(name: str, city: str) -> str:
    """A call as the fake engine's model writes it."""
    call = {"name": name, "arguments": {"city": city}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


TOOLS: list[ChatCompletionFunctionToolParam] = [tool("weather"), tool("time")]
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What about Paris?"}]
ONE = call_text("weather", "Paris")
TWO = f"{ONE}\n{call_text('time', 'Lyon')}"
HELLO = [{"role": "user", "content": "hello"}]
