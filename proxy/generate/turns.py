"""Builds the messages of a `Chat` for APIs that write them otherwise than templates read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.wrong_values import invalid

_BETWEEN = "\n"  # texts that become one message


class Turns:
    """
    Messages in the shape of `Chat.messages`, turn by turn.

    Neighbours of one role become one message: most templates want users and assistants in turns, and one
    system message.
    """

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}  # of the tools that were called, by call id

    @property
    def messages(self) -> tuple[Mapping[str, Any], ...]:
        return tuple(self._messages)

    def say(self, role: str, text: str) -> None:
        """`role`: system, user or assistant."""
        message = self._turn_of(role)
        message["content"] = _BETWEEN.join(filter(None, (message["content"], text)))

    def call(self, call_id: str, name: str, arguments: Mapping[str, Any]) -> None:
        """The assistant calls a tool."""
        self._names[call_id] = name
        function = {"name": name, "arguments": dict(arguments)}
        calls = self._turn_of("assistant").setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def result(self, call_id: str, text: str, *, param: str) -> None:
        """What the tool answered. Raises RequestError for `param` if no such call came before."""
        if call_id not in self._names:
            raise invalid(param, "no call before it has this id; send the call along with its result")
        name = self._names[call_id]
        self._messages.append({"role": "tool", "tool_call_id": call_id, "name": name, "content": text})

    def check_complete(self, *, param: str) -> None:
        """Raises RequestError for `param` if there is nothing to answer, or a call without its result."""
        if not self._messages:
            raise invalid(param, "expected a message with text")
        if "tool_calls" in self._messages[-1]:
            raise invalid(param, "the last message calls tools; send their results, too")

    def _turn_of(self, role: str) -> dict[str, Any]:
        """The last message, or a new one if that is another's."""
        if not self._messages or self._messages[-1]["role"] != role:
            self._messages.append({"role": role, "content": ""})
        return self._messages[-1]
