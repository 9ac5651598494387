"""The input items of the Responses API, and how they become a chat's turns."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field

from proxy.generate.part import Identifier, Part, joined, of_types, text_as
from proxy.generate.turns import Turns
from proxy.wrong_values import wrong

_TEXT_ONLY = "this server reads no images, files or audio"
_SEND_ITEMS = "this server stores nothing and runs no tools, so send every item itself"


def _is_object(arguments: str) -> str:
    try:
        if isinstance(json.loads(arguments or "{}"), dict):
            return arguments
    except (ValueError, RecursionError):
        pass
    raise wrong("the JSON text of an object", arguments)


class TextPart(Part):
    """A piece of a message; a refusal is one, too."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class RefusalPart(Part):
    """What an assistant said instead of an answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


_Text = of_types("input_text", "output_text", "text", "refusal", hint=_TEXT_ONLY)
Content = Annotated[
    list[Annotated[TextPart | RefusalPart, Discriminator("type"), BeforeValidator(_Text)]],
    Field(fail_fast=True),
    text_as("input_text"),
]


class MessageItem(Part):
    """A message. A developer is a system by another name."""

    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: Content

    def add_to(self, turns: Turns, *, at: str) -> None:
        turns.say("system" if self.role == "developer" else self.role, joined(self.content))


class CallItem(Part):
    """An assistant's call of a tool."""

    type: Literal["function_call"]
    call_id: Identifier
    name: Identifier
    arguments: Annotated[str, AfterValidator(_is_object)]

    def add_to(self, turns: Turns, *, at: str) -> None:
        arguments: dict[str, Any] = json.loads(self.arguments or "{}")
        turns.call(self.call_id, self.name, arguments)


class CallOutputItem(Part):
    """What the tool answered."""

    type: Literal["function_call_output"]
    call_id: Identifier
    output: Content

    def add_to(self, turns: Turns, *, at: str) -> None:
        """Raises RequestError for the output of a call that is not there."""
        turns.result(self.call_id, joined(self.output), param=f"{at}.call_id")


class ReasoningItem(Part):
    """What an assistant thought. It is dropped: templates show no earlier thoughts."""

    type: Literal["reasoning"]

    def add_to(self, turns: Turns, *, at: str) -> None:
        pass


_Known = of_types(
    "message", "function_call", "function_call_output", "reasoning", default="message", hint=_SEND_ITEMS
)
Item = Annotated[
    MessageItem | CallItem | CallOutputItem | ReasoningItem, Discriminator("type"), BeforeValidator(_Known)
]


def _as_items(given: object) -> object:
    """A string is short for one message of the user."""
    return [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given


Input = Annotated[list[Item], Field(min_length=1, fail_fast=True), BeforeValidator(_as_items)]
