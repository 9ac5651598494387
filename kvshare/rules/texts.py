"""
Finds the texts in a request's JSON body, for every API that takes prompts.

In a malformed body fewer texts are found, or none. The route that reads the body reports the fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["system", "user", "tool"]
Path = tuple[str | int, ...]  # keys and indices from the body to a text

_ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "tool": "tool",
    "function": "tool",
}
_TEXT_PARTS = ("text", "input_text")


@dataclass(frozen=True, slots=True)
class BodyText:
    """One text of a body, and its role."""

    role: Role
    path: Path
    text: str


@dataclass(frozen=True, slots=True)
class End:
    """The text to which a rule may append. `new_part`: None, or the type of the text part to create there."""

    path: Path
    new_part: str | None = None


@dataclass(frozen=True, slots=True)
class BodyShape:
    """The members of an API's body that hold text."""

    texts: Mapping[str, Role]  # text, or a list of texts or text parts
    messages: str | None = None  # a list of messages, or one user message's text
    part_type: str = "text"  # of a text that a user writes


CHAT = BodyShape({}, "messages")
SHAPES: Mapping[str, BodyShape] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": BodyShape({"prompt": "user"}),
    "/v1/responses": BodyShape({"instructions": "system"}, "input", "input_text"),
    "/v1/messages": BodyShape({"system": "system"}, "messages"),
}


def shape_of(path: str) -> BodyShape | None:
    """Return the shape of the bodies of a route, also of one below it; None if they have no prompt."""
    return next(
        (shape for route, shape in SHAPES.items() if path == route or path.startswith(f"{route}/")), None
    )


def texts_of(body: Mapping[str, Any], shape: BodyShape) -> list[BodyText]:
    """Return all texts of systems, users and tools, in the prompt's order, without those of the model."""
    texts: list[BodyText] = []
    for name, role in shape.texts.items():
        texts += _texts(role, body.get(name), (name,))
    if shape.messages is not None:
        messages = body.get(shape.messages)
        if isinstance(messages, str):
            texts.append(BodyText("user", (shape.messages,), messages))
        for path, role, content in _contents(messages, shape.messages):
            texts += _texts(role, content, path)
    return texts


def end_of(body: Mapping[str, Any], shape: BodyShape) -> End | None:
    """
    The end of the last message that a user or a tool has written: the model's answer comes after it.

    None where there is no such message. The prompt of a completion has no such end: the model goes on there.
    """
    if shape.messages is None:
        return None
    messages = body.get(shape.messages)
    if isinstance(messages, str):
        return End((shape.messages,))
    for path, role, content in reversed(list(_contents(messages, shape.messages))):
        if role == "system":
            continue
        if isinstance(content, str):
            return End(path)
        if isinstance(content, list):
            last = (*path, len(content) - 1, "text")
            if any(text.path == last for text in _texts(role, content, path)):
                return End(last)
            return End((*path, len(content), "text"), shape.part_type)
    return None


def with_text(body: Any, path: Path, text: str, *, new_part: str | None = None) -> Any:
    """Return a copy of the body with another text at a path. Objects that are not on the path are shared."""
    if not path:
        return text
    key, rest = path[0], path[1:]
    if isinstance(body, Mapping):
        return {**body, key: with_text(body.get(key), rest, text, new_part=new_part)}
    parts = list(body)
    if key == len(parts):
        parts.append({"type": new_part})
    index = int(key)
    parts[index] = with_text(parts[index], rest, text, new_part=new_part)
    return parts


def _contents(messages: object, name: str) -> Iterator[tuple[Path, Role, object]]:
    """Yield path of the content, role and content of each message that is not the model's."""
    for number, message in enumerate(messages if isinstance(messages, list) else ()):
        if not isinstance(message, Mapping):
            continue
        role = message.get("role")
        if message.get("type") == "function_call_output":
            yield (name, number, "output"), "tool", message.get("output")
        elif isinstance(role, str) and role in _ROLES:
            yield (name, number, "content"), _ROLES[role], message.get("content")


def _texts(role: Role, content: object, path: Path) -> Iterator[BodyText]:
    """Yield the texts in `content`: itself if it is a text, or those of a list of texts and parts."""
    if isinstance(content, str):
        yield BodyText(role, path, content)
    parts: Sequence[object] = content if isinstance(content, list) else ()
    for number, part in enumerate(parts):
        if isinstance(part, str):
            yield BodyText(role, (*path, number), part)
        elif not isinstance(part, Mapping):
            continue
        elif part.get("type") in _TEXT_PARTS and isinstance(part.get("text"), str):
            yield BodyText(role, (*path, number, "text"), part["text"])
        elif part.get("type") == "tool_result" and role == "user":
            yield from _texts("tool", part.get("content"), (*path, number, "content"))
