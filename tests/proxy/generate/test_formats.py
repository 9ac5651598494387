"""JSON as an answer's format, by OpenAI's name for it and by vLLM's."""

from __future__ import annotations

import json

import pytest

from kvshare.conversation.chat import Chat
from kvshare.conversation.grammar import grammar_of
from kvshare.conversation.tools import ToolFormat
from tests.proxy.conftest import Server, chat

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("given", "schema"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"type": "object"}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            SCHEMA,
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": True, "schema": SCHEMA},
                }
            },
            SCHEMA,
        ),
        ({"guided_json": SCHEMA}, SCHEMA),
        ({"guided_json": json.dumps(SCHEMA)}, SCHEMA),
        ({"structured_outputs": {"json": SCHEMA}}, SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}}, SCHEMA),
        ({"structured_outputs": {"json_object": True}}, {"type": "object"}),
        ({"structured_outputs": {}}, None),
        ({"guided_json": SCHEMA, "response_format": {"type": "text"}}, SCHEMA),
    ],
)
async def test_a_schema_becomes_the_grammar(
    server: Server, path: str, given: dict[str, object], schema: dict[str, object] | None
) -> None:
    """On both routes, strict or not: what is asked for is forced."""
    response = await server.post(path, chat() | {"prompt": "a"} | given)
    assert response.status == 200, await response.text()
    expected = grammar_of(Chat((), answer_schema=schema), ToolFormat.HERMES)
    found = server.engine.requests[0].sampling.grammar
    assert (found and found.lark) == (expected and expected.lark)
    assert (expected is None) == (schema is None)


@pytest.mark.parametrize(
    ("given", "param", "code"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", None),
        ({"response_format": {}}, "response_format.type", None),
        ({"response_format": "json"}, "response_format", None),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", None),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
            "response_format.json_schema.schema",
            None,
        ),
        ({"guided_json": "{"}, "guided_json", None),
        ({"guided_json": "[" * 100_000}, "guided_json", None),
        ({"guided_json": [1]}, "guided_json", None),
        ({"structured_outputs": "json"}, "structured_outputs", None),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs.regex", "unsupported_parameter"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice", "unsupported_parameter"),
        ({"guided_json": SCHEMA, "structured_outputs": {"json": SCHEMA}}, "structured_outputs", None),
    ],
)
async def test_what_is_no_format_is_refused(
    server: Server, given: dict[str, object], param: str, code: str | None
) -> None:
    """A client that asks for a format must not take prose for it."""
    response = await server.post(CHAT, chat() | given)
    error = (await response.json())["error"]
    assert (response.status, error["param"], error["code"]) == (400, param, code), error
