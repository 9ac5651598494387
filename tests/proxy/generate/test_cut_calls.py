"""A call that the token limit cuts: what each API says of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.proxy.conftest import chat, running_server
from tests.proxy.fake_engine import Behaviour
from tests.proxy.generate.tool_calls import CHAT, HELLO, ONE, TOOLS, TWO, function


def joined_stream(text: str) -> tuple[dict[str, Any], list[str], str | None]:
    """The message of a stream of chunks, the tokens of its log-probabilities, and its finish reason."""
    chunks = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    choices = [chunk["choices"][0] for chunk in chunks]
    calls: dict[int, str] = {}
    for delta in (call for choice in choices for call in choice["delta"].get("tool_calls", ())):
        calls[delta["index"]] = calls.get(delta["index"], "") + delta["function"]["arguments"]
    content = "".join(choice["delta"].get("content") or "" for choice in choices)
    tokens = [token["token"] for each in choices if each["logprobs"] for token in each["logprobs"]["content"]]
    return {"content": content, "arguments": list(calls.values())}, tokens, choices[-1]["finish_reason"]


def is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except ValueError:
        return False


CUTS: list[dict[str, Any]] = [
    *({"max_tokens": number} for number in (1, 11, 14, 30, 45, 60, 77, 78, 90, 92, 100, 130, len(TWO))),
    *({"stop": [stop]} for stop in ("Par", "name", "weather", "}", "</tool", "\n<", "time", "Ly", "zz", "<")),
]


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("tool_choice", ["required", "auto"])
async def test_a_cut_call_is_never_a_finished_one(cut: dict[str, Any], tool_choice: str) -> None:
    """
    Wherever the tokens or a stop string end an answer: `tool_calls` has whole objects only, no markup is
    text, a stream is the whole answer, and log-probabilities are those of what is shown.
    """
    body = chat(tools=TOOLS, tool_choice=tool_choice, logprobs=True, **cut)
    async with running_server(Behaviour(says=TWO)) as server:
        (choice,) = (await (await server.post(CHAT, body)).json())["choices"]
        message, tokens, end = joined_stream(await (await server.post(CHAT, body | {"stream": True})).text())
    arguments = [call["function"]["arguments"] for call in choice["message"].get("tool_calls", ())]
    content = choice["message"]["content"] or ""
    assert ({"content": content, "arguments": arguments}, choice["finish_reason"]) == (message, end)
    is_whole = bool(arguments) and all(map(is_object, arguments))
    if "max_tokens" in cut:
        assert end == ("length" if cut["max_tokens"] < len(TWO) else "tool_calls")
    else:
        assert end == ("tool_calls" if is_whole else "stop")
    assert len(content) < (1 if tool_choice == "required" else 3)
    assert [token["token"] for token in choice["logprobs"]["content"]] == tokens
    assert TWO.startswith("".join(tokens))
    shown = len("".join(tokens).rstrip())
    if len(arguments) < 2:
        assert shown <= (len(ONE) if arguments else len(content))
    if is_whole and len(arguments) == 1:
        assert shown >= TWO.index("}}")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("cut", "stop_reason"),
    [
        ({"stop_sequences": ["Par"]}, "stop_sequence"),
        ({"stop_sequences": ["time"]}, "stop_sequence"),
        ({"max_tokens": 40}, "max_tokens"),
        ({"max_tokens": len(ONE) + 14}, "max_tokens"),
        ({}, "tool_use"),
    ],
)
async def test_a_cut_call_of_messages(cut: dict[str, Any], stop_reason: str, stream: bool) -> None:
    """`tool_use` is the end of whole calls only, and no block of text has markup."""
    tools = [{"name": name, "input_schema": function(name)["parameters"]} for name in ("weather", "time")]
    body = {"model": "echo", "max_tokens": 400, "messages": HELLO, "tools": tools}
    body |= {"tool_choice": {"type": "any"}, "stream": stream, **cut}
    async with running_server(Behaviour(says=TWO)) as server:
        text = await (await server.post("/v1/messages", body)).text()
    if not stream:
        document = json.loads(text)
        assert document["stop_reason"] == stop_reason
        assert {block["type"] for block in document["content"]} == {"tool_use"}
    else:
        assert f'"stop_reason":"{stop_reason}"' in text.replace(": ", ":")
        assert '"text_delta"' not in text


@pytest.mark.parametrize(
    ("says", "limit", "statuses"),
    [
        (TWO, None, ["completed", "completed"]),
        (TWO, len(ONE) - 13, ["completed"]),
        (TWO, len(ONE) - 30, ["incomplete"]),
        (TWO, len(ONE) + 14, ["completed"]),
        (TWO, len(TWO) - 30, ["completed", "incomplete"]),
        ('<tool_call>{"name": "time", "arguments": {"a": "\n"}}</tool_call>', None, ["incomplete"]),
    ],
)
async def test_a_cut_call_of_responses(says: str, limit: int | None, statuses: list[str]) -> None:
    """Items that are no whole calls are incomplete; the head of another call is no item."""
    tools = [{"type": "function", **function(name)} for name in ("weather", "time")]
    body = {"model": "echo", "input": "hi", "tools": tools, "tool_choice": "required"}
    async with running_server(Behaviour(says=says)) as server:
        response = await server.post("/v1/responses", body | {"max_output_tokens": limit})
        stream = await server.post("/v1/responses", body | {"max_output_tokens": limit, "stream": True})
        document, text = await response.json(), await stream.text()
    assert [(item["type"], item["status"]) for item in document["output"]] == [
        ("function_call", status) for status in statuses
    ]
    assert document["status"] == ("completed" if limit is None else "incomplete")
    assert text.count('"response.output_item.done"') >= len(statuses)
    assert "output_text" not in text
