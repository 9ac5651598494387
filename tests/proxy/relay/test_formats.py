"""Formats that would end or choke vLLM are refused by the proxy: vLLM gets no byte of such a request."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from proxy.relay.formats import formats_of
from tests.fake_vllm import MODEL, FakeVllm
from tests.proxy.relay.relay_server import Relay

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
# In vLLM llguidance compiles it, as xgrammar does not support `multipleOf`, and ends the process.
PROPERTIES = {
    "a": {"type": "integer", "minimum": -(2**63), "maximum": -(2**63) + 3},
    "b": {"type": "integer", "multipleOf": 3},
}
CRASHES = {"type": "object", "properties": PROPERTIES}
ENDLESS = {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#"}, "minItems": 1}}}


def function(schema: object, **more: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": "f", "parameters": schema}, **more}


def places(schema: object) -> list[tuple[str, dict[str, Any]]]:
    """Everywhere that a client can write a schema, by route."""
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    chat, text = "/v1/chat/completions", "/v1/completions"
    return [
        (chat, {"response_format": named}),
        (text, {"response_format": named}),
        (chat, {"guided_json": schema}),
        (text, {"structured_outputs": {"json": schema}}),
        (chat, {"structured_outputs": {"json": json.dumps(schema)}}),
        (chat, {"tools": [function(schema)]}),
        (chat, {"tools": [function(SCHEMA), function(schema, strict=True)], "tool_choice": "required"}),
        (chat, {"functions": [{"name": "f", "parameters": schema}]}),
        ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}}),
        (
            "/v1/responses",
            {"tools": [{"type": "function", "name": "f", "parameters": schema, "strict": True}]},
        ),
        ("/v1/messages", {"tools": [{"name": "f", "input_schema": schema}]}),
        ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": schema}}}),
        ("/v1/messages", {"output_format": {"type": "json_schema", "schema": schema}}),
        ("/v1/chat/completions/batch", {"response_format": named}),
    ]


def whole(path: str, members: dict[str, Any]) -> dict[str, Any]:
    prompts: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "a"},
        "/v1/responses": {"input": "a"},
        "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9},
    }
    return {"model": MODEL, **prompts.get(path, {"messages": [{"role": "user", "content": "a"}]}), **members}


async def test_a_schema_that_ends_a_compiler_is_refused_on_every_route(relay: Relay, vllm: FakeVllm) -> None:
    """With 400 and the reason; nothing was sent, not even to be rendered."""
    # Keywords that are not JSON Schema's do not hide it, also those that formats have at other levels.
    hidden = {**CRASHES, "schema": {"type": "string"}, "json_schema": {"schema": {}}, "type": "object"}
    for path, members in [*places(CRASHES), *places(hidden)]:
        response = await relay.send(path, whole(path, members))
        assert response.status == 400, (path, members, await response.text())
        message = (await response.json())["error"]["message"]
        assert "the answer cannot be constrained to this format: its compiler failed" in message
    assert not [seen for seen in [*vllm.seen, *vllm.rendered] if seen.method == "POST"]


async def test_a_schema_without_a_finite_answer_is_refused(relay: Relay) -> None:
    """vLLM would write to the end of the context."""
    path, members = places(ENDLESS)[0]
    response = await relay.send(path, whole(path, members))
    assert response.status == 400
    assert "without end" in (await response.json())["error"]["message"]


async def test_a_usual_schema_passes_on_every_route(relay: Relay, vllm: FakeVllm) -> None:
    """And is compiled once, wherever it is."""
    for path, members in places(SCHEMA):
        await relay.send(path, whole(path, members))
        assert vllm.seen[-1].path == path
    assert len(relay.engine.server.formats._passed) == 1


async def test_a_hostile_schema_delays_no_other_client(relay: Relay) -> None:
    """Requests without a format do not wait for the process that compiles."""
    path, members = places({"type": "integer", "multipleOf": 2**31})[0]
    hostile = asyncio.create_task(relay.send(path, whole(path, members)))
    await asyncio.sleep(0.3)
    response = await relay.send(path, whole(path, {}))
    assert response.status == 200
    assert not hostile.done()
    hostile.cancel()
    await asyncio.gather(hostile, return_exceptions=True)


@pytest.mark.parametrize(
    "members",
    [
        {"tools": 5, "functions": {}, "response_format": [], "structured_outputs": "a", "text": 1},
        {"tools": [1, {"function": 3}, {"function": {"parameters": "x"}}]},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
        {"response_format": {"type": "text"}, "guided_json": "", "output_config": {"effort": "low"}},
        {"structured_outputs": {"json": "{", "choice": "a", "json_object": True}, "tool_choice": "none"},
        {"tools": [function(CRASHES)], "tool_choice": "none"},
    ],
)
def test_what_is_no_format_is_left_for_vllm(members: dict[str, Any]) -> None:
    """Wrong types, and tools that may not be called."""
    kinds = [each.kind for each in formats_of(members)]
    assert kinds in ([], ["choice"])
