"""Where a client can write a schema, on each route that generates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "What is on form 7?"}

Place = Callable[[dict[str, Any]], tuple[str, dict[str, Any]]]


def _tool(schema: dict[str, Any], **more: object) -> dict[str, Any]:
    return {"name": "note", "description": "notes something", "parameters": schema, **more}


def _called(schema: dict[str, Any], **more: object) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": _tool(schema, **more)}], "tool_choice": "required"}


def _format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


PLACES: dict[str, Place] = {
    "chat": lambda schema: (CHAT, {"messages": [USER], "response_format": _format(schema)}),
    "completion": lambda schema: ("/v1/completions", {"prompt": "7:", "response_format": _format(schema)}),
    "guided": lambda schema: ("/v1/completions", {"prompt": "7:", "guided_json": schema}),
    "text": lambda schema: (
        "/v1/responses",
        {"input": "a", "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}},
    ),
    "chat tool": lambda schema: (CHAT, {"messages": [USER], **_called(schema, strict=True)}),
    "lenient tool": lambda schema: (CHAT, {"messages": [USER], **_called(schema)}),
    "responses tool": lambda schema: (
        "/v1/responses",
        {"input": "a", "tools": [_tool(schema, type="function", strict=True)], "tool_choice": "required"},
    ),
    "messages tool": lambda schema: (
        "/v1/messages",
        {
            "messages": [USER],
            "tools": [{"name": "note", "input_schema": schema}],
            "tool_choice": {"type": "any"},
        },
    ),
    "messages": lambda schema: (
        "/v1/messages",
        {"messages": [USER], "output_config": {"format": {"type": "json_schema", "schema": schema}}},
    ),
}
LENIENT = ("lenient tool", "messages tool")  # what is not supported of their schemas is left out


def request_at(
    place: str, schema: dict[str, Any], *, model: str, max_tokens: int
) -> tuple[str, dict[str, Any]]:
    """The path and the body of a greedy request with this schema."""
    path, members = PLACES[place](schema)
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    return path, {"model": model, "temperature": 0, limit: max_tokens, **members}
