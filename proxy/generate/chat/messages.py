"""The messages of a chat body, as OpenAI's clients of all ages write them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvshare.conversation.history import template_messages
from kvshare.errors import UnsupportedParameterError
from proxy.wrong_values import found, invalid

_REASONING = ("reasoning_content", "reasoning")  # DeepSeek's name, which templates know, and vLLM's


def chat_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """
    The messages of a `Chat`. An assistant's reasoning is there for the templates that show it.

    Raises:  RequestError naming the field, if a message is not as OpenAI's API describes it
    """
    read = template_messages(list(_of_today(messages)))
    return tuple(_with_reasoning(message, sent) for message, sent in zip(read, messages, strict=True))


def _of_today(messages: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Functions as tools: a call gets an id, by which the next result finds it. Equal chats get equal ids."""
    call_id = "call_0"
    for number, message in enumerate(messages):
        if message.get("audio") is not None:
            raise UnsupportedParameterError(f"messages[{number}].audio", "this server reads text only")
        if message.get("role") in ("tool", "function") and message.get("content") is None:
            message = {**message, "content": ""}
        if message.get("role") == "function":
            yield {**message, "role": "tool", "tool_call_id": call_id}
        elif message.get("function_call") is not None and not message.get("tool_calls"):
            call_id = f"call_{number}"
            function = _function(message["function_call"], f"messages[{number}].function_call")
            yield {**message, "tool_calls": [{"id": call_id, "type": "function", "function": function}]}
        elif isinstance(calls := message.get("tool_calls"), list):
            yield {**message, "tool_calls": [_call(call) for call in calls]}
        else:
            yield message


def _function(function: object, param: str) -> Mapping[str, Any]:
    if isinstance(function, dict) and isinstance(function.get("name"), str):
        return _with_arguments(function)
    raise invalid(param, f"expected an object with 'name' and 'arguments', got {found(function)}")


def _call(call: object) -> object:
    """A call with the defaults that clients leave out."""
    if not isinstance(call, dict):
        return call
    call = {"type": "function"} | {name: value for name, value in call.items() if value is not None}
    if isinstance(call.get("function"), dict):
        call["function"] = _with_arguments(call["function"])
    return call


def _with_arguments(function: dict[str, Any]) -> dict[str, Any]:
    """No arguments are an empty object; some clients send the object itself instead of its JSON text."""
    arguments = function.get("arguments") or {}
    return {**function, "arguments": json.dumps(arguments) if isinstance(arguments, dict) else arguments}


def _with_reasoning(message: Mapping[str, Any], sent: Mapping[str, Any]) -> Mapping[str, Any]:
    given = [sent[name] for name in _REASONING if isinstance(sent.get(name), str) and sent[name]]
    if message["role"] != "assistant" or not given:
        return message
    return {**message, "reasoning_content": given[0]}
