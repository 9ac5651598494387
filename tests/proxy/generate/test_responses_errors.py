"""What the Responses API refuses, and how."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from kvshare.errors import OverloadedError, RequestError
from tests.proxy.conftest import Server, running_server
from tests.proxy.fake_engine import Behaviour

RESPONSES = "/v1/responses"
ASK: dict[str, Any] = {"model": "echo", "input": "hello"}
TOOL = {"type": "function", "name": "time", "parameters": {"type": "object"}}
CALL = {"type": "function_call", "call_id": "c1", "name": "time", "arguments": "{}"}
NAMED = {"type": "function", "name": "x"}


def said(*content: object) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": list(content)}]}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": ["hello"]}, "input[0]"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": "computer_call"}]}, "input[0]"),
        (said({"type": "input_image", "image_url": "http://x"}), "input[0].content[0]"),
        (said({"type": "input_text"}), "input[0].content[0].text"),
        ({"input": [CALL]}, "input"),
        ({"input": [{**CALL, "arguments": "["}]}, "input[0].arguments"),
        ({"input": [{**CALL, "arguments": "[]"}]}, "input[0].arguments"),
        ({"input": [{**CALL, "call_id": ""}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c1", "output": "x"}]}, "input[0].call_id"),
        ({"instructions": 3}, "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"stream": 1}, "stream"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "x"}, "tools": [TOOL]}, "tool_choice.name"),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [NAMED],
                },
                "tools": [TOOL],
            },
            "tool_choice.tools",
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "any", "tools": [NAMED]}, "tools": [TOOL]},
            "tool_choice.mode",
        ),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"truncation": "middle"}, "truncation"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"background": True}, "background"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"moderation": {"model": "x"}}, "moderation"),
        ({"kvshare": {"mode": "bold"}}, "kvshare.mode"),
    ],
)
async def test_bad_input_names_the_field(server: Server, change: dict[str, Any], param: str) -> None:
    """What cannot be read, or is not done here, is a 400 that names the field; nothing is generated."""
    response = await server.post(RESPONSES, {**ASK, **change})
    assert response.status == 400
    error = (await response.json())["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert not server.engine.requests


@pytest.mark.parametrize("name", ["previous_response_id", "conversation"])
async def test_stored_conversations_are_refused_with_the_way_out(server: Server, name: str) -> None:
    """The client learns what to send instead."""
    async with server.client() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(**{**ASK, name: "x"})
    assert caught.value.code == "unsupported_parameter"
    assert "send the whole conversation as 'input'" in caught.value.message


async def test_stored_responses_are_not_there(server: Server) -> None:
    """What concerns a stored response is a 404 that says that none is stored."""
    async with server.client() as client:
        for ask in (
            client.responses.retrieve("resp_1"),
            client.responses.delete("resp_1"),
            client.responses.cancel("resp_1"),
            client.responses.input_items.list("resp_1"),
        ):
            with pytest.raises(openai.NotFoundError, match="stores no responses"):
                await ask


async def test_another_model_is_404(server: Server) -> None:
    """A model that is not served is refused as on the chat routes."""
    async with server.client() as client:
        with pytest.raises(openai.NotFoundError) as caught:
            await client.responses.create(model="gpt-5", input="a")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_is_429(stream: bool) -> None:
    """Before the first byte an error has its own status, streaming or not."""
    async with running_server(Behaviour(refuse=OverloadedError("The queue is full."))) as server:
        response = await server.post(RESPONSES, {**ASK, "stream": stream})
        assert response.status == 429
        assert (await response.json())["error"]["code"] == "queue_full"


async def test_a_prompt_that_is_too_long(server: Server) -> None:
    """It has the code that clients look for."""
    response = await server.post(RESPONSES, {**ASK, "input": "x" * 2000})
    assert response.status == 400
    error = (await response.json())["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")


async def test_a_chat_that_the_template_rejects_is_this_apis_input() -> None:
    """The engine, which knows no API, calls it messages."""
    rejected = RequestError("the chat template rejects these messages: no", param="messages")
    async with running_server(Behaviour(refuse_prompt=rejected)) as server:
        response = await server.post(RESPONSES, ASK)
        assert (response.status, (await response.json())["error"]["param"]) == (400, "input")
