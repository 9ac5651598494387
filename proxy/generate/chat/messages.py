"""The messages of a chat body, as OpenAI's clients of all ages write them; checked for their form."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from proxy.generate.fields import Body
from proxy.request_body import at_most
from proxy.wrong_values import found, wrong

MAX_CALLS = 512  # of tools, in one message
_TEXT_OF = {"text": "text", "refusal": "refusal"}  # the key that holds the text of a part, by its type
_MEDIA = ("image_url", "input_audio", "audio_url", "video_url", "file")


def _one_text(content: object) -> object:
    """Text, or a list of text parts joined to one text."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong("a string or a list of text parts", content)
    return "".join(_part_text(part) for part in content)


def _part_text(part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    key = _TEXT_OF.get(kind) if isinstance(kind, str) else None
    if key is None:
        raise _no_text(part, kind)
    text = part.get(key) if isinstance(part, dict) else None
    if not isinstance(text, str):
        raise wrong(f"a string as '{key}' of each part of this type", text)
    return text


def _no_text(part: object, kind: object) -> PydanticCustomError:
    given = f"one of type '{kind}'" if kind in _MEDIA else found(part)
    message = "expected parts of type 'text', as this server reads text only, got {given}"
    return PydanticCustomError("wrong_value", message, {"given": given})


Text = Annotated[str | None, BeforeValidator(_one_text)]


class CalledFunction(Body):
    """A function that was called: its arguments are JSON text, empty where there are none."""

    name: Annotated[str, Field(min_length=1)]
    arguments: str | dict[str, Any] | None = None


class ToolCall(Body):
    """One call of a tool in an assistant's message."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class Message(Body):
    """One message. Which of the fields matter depends on the role."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Text = None
    name: str | None = None
    refusal: str | None = None
    reasoning: str | None = None  # vLLM's name
    reasoning_content: str | None = None  # DeepSeek's
    tool_calls: Annotated[list[ToolCall], at_most(MAX_CALLS)] | None = None
    function_call: CalledFunction | None = None
    tool_call_id: str | None = None

    def as_sent(self) -> dict[str, Any]:
        """What the client wrote, its text in one piece."""
        return self.model_dump(exclude_none=True)
