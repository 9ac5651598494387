"""
Reads the fields of a body that decide how messages become a prompt, and makes a `Chat`. The messages are as
OpenAI's clients of all ages write them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from kvshare.conversation.chat import Chat
from kvshare.conversation.history import template_messages
from kvshare.errors import UnsupportedParameterError
from proxy.generate.body_parts import NO_CALL
from proxy.generate.chat.tools import Functions, Tools, read_tools
from proxy.generate.fields import Body
from proxy.wrong_values import found, invalid

_REASONING = ("reasoning_content", "reasoning")  # DeepSeek's name, which templates know, and vLLM's


class TemplateBody(Body):
    """The messages, the tools, and what the template is given besides them."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    tools: Tools | None = None
    tool_choice: Any = None
    functions: Functions | None = None
    function_call: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_continued(self) -> Self:
        """Raises RequestError."""
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise invalid(
                    "add_generation_prompt", "expected false with 'continue_final_message', got true"
                )
            if self.messages[-1].get("role") != "assistant":
                raise invalid("continue_final_message", "expected an assistant's message as the last one")
        return self

    @property
    def answer_schema(self) -> Mapping[str, Any] | None:
        """None: any text."""
        return None

    @property
    def answer_param(self) -> str:
        """Return the parameter that asks for the form of the answer, for errors."""
        return "response_format"

    @property
    def chat(self) -> Chat:
        """Raises RequestError naming the field."""
        tools, choice = read_tools(self.tools, self.tool_choice, self.functions, self.function_call)
        kwargs = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:  # as in vLLM it also switches thinking on or off
            kwargs.setdefault("enable_thinking", self.reasoning_effort != "none")
            kwargs["reasoning_effort"] = self.reasoning_effort
        return Chat(
            messages=_chat_messages(self.messages),
            tools=tools,
            tool_choice=choice,
            # The older API has room for one call.
            parallel_tool_calls=self.parallel_tool_calls is not False and not self.functions,
            answer_schema=self.answer_schema,
            answer_param=self.answer_param,
            continue_final_message=bool(self.continue_final_message),
            add_generation_prompt=self.add_generation_prompt is not False,
            template_kwargs=kwargs,
        )


def _chat_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """
    The messages of a `Chat`. An assistant's reasoning is there for the templates that show it.

    Raises:  RequestError naming the field, if a message is not as OpenAI's API describes it
    """
    read = template_messages(list(_of_today(messages)))
    _check_calls_of_results(read, messages)
    return tuple(_with_reasoning(message, sent) for message, sent in zip(read, messages, strict=True))


def _check_calls_of_results(read: Sequence[Mapping[str, Any]], sent: Sequence[Mapping[str, Any]]) -> None:
    """
    As OpenAI does, refuse a tool's result whose call is not in the messages before it.

    The older API's functions have no ids.
    """
    called: set[str] = set()
    for number, message in enumerate(read):
        called.update(call["id"] for call in message.get("tool_calls", ()))
        if sent[number].get("role") == "tool" and message["tool_call_id"] not in called:
            raise invalid(f"messages[{number}].tool_call_id", NO_CALL)


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
            function = message["function_call"]
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                problem = f"expected an object with 'name' and 'arguments', got {found(function)}"
                raise invalid(f"messages[{number}].function_call", problem)
            call = {"id": call_id, "type": "function", "function": _with_arguments(function)}
            yield {**message, "tool_calls": [call]}
        elif isinstance(calls := message.get("tool_calls"), list):
            yield {**message, "tool_calls": [_call(call) for call in calls]}
        else:
            yield message


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
    reasoning = [sent[name] for name in _REASONING if isinstance(sent.get(name), str) and sent[name]]
    if message["role"] != "assistant" or not reasoning:
        return message
    return {**message, "reasoning_content": reasoning[0]}
