"""Chats with tools, and answers read from pieces of text."""

from collections.abc import Iterable, Sequence
from typing import Any

from kvshare.conversation.chat import CallArguments, CallBegins, Chat, Part, Reasoning, Text
from kvshare.conversation.parser import joined, parser_for
from kvshare.conversation.tools import ToolFormat

WEATHER_SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
        "hourly": {"type": ["boolean", "null"]},
        "place": {"$ref": "#/$defs/Place"},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"Place": {"type": "object", "properties": {"x": {"type": "number"}}}},
}


def tool(name: str, parameters: dict[str, Any] | None = None, **more: object) -> dict[str, Any]:
    """A tool as OpenAI writes it."""
    function = {"name": name, "description": f"What {name} does."} | more
    return {
        "type": "function",
        "function": function if parameters is None else function | {"parameters": parameters},
    }


TOOLS = (tool("weather", WEATHER_SCHEMA), tool("now"))
CHAT = Chat(({"role": "user", "content": "How is it?"},), TOOLS)


def pieces(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


def read(
    fmt: ToolFormat, texts: Iterable[str], *, chat: Chat = CHAT, in_reasoning: bool = False
) -> list[Part]:
    """The joined parts of an answer that comes in these pieces."""
    parser = parser_for(chat, fmt, in_reasoning=in_reasoning)
    parts = [part for text in texts for part in parser.add(text)]
    return joined([*parts, *parser.end()])


def plain(parts: Sequence[Part]) -> list[tuple[object, ...]]:
    """The parts without the ids of calls, which are random."""
    rows: list[tuple[object, ...]] = []
    for part in parts:
        match part:
            case Text(text):
                rows.append(("text", text))
            case Reasoning(text):
                rows.append(("thought", text))
            case CallBegins(number, _, name):
                rows.append(("call", number, name))
            case CallArguments(number, text):
                rows.append(("arguments", number, text))
    return rows


def read_plain(
    fmt: ToolFormat, text: str, *, chat: Chat = CHAT, in_reasoning: bool = False
) -> list[tuple[object, ...]]:
    """The same from the whole text, which is checked to be that of its single characters."""
    whole = plain(read(fmt, [text], chat=chat, in_reasoning=in_reasoning))
    assert plain(read(fmt, text, chat=chat, in_reasoning=in_reasoning)) == whole
    return whole
