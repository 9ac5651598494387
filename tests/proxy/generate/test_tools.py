"""Tools on /v1/chat/completions: what the engine is asked, and how calls in its answer reach the clients."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.chat import (
    ChatCompletionMessage,
    ChatCompletionMessageFunctionToolCall,
    ChatCompletionMessageParam,
)

from kvshare.conversation.chat import ToolChoice, ToolUse
from tests.proxy.conftest import Server, chat, running_server
from tests.proxy.fake_engine import Behaviour
from tests.proxy.generate.tool_calls import CHAT, MESSAGES, ONE, TOOLS, TWO


def calls_of(message: ChatCompletionMessage) -> list[ChatCompletionMessageFunctionToolCall]:
    calls = [call for call in message.tool_calls or () if call.type == "function"]
    assert len(calls) == len(message.tool_calls or ())
    return calls


async def test_a_call_is_no_text() -> None:
    """An answer that only calls has calls, null as content, and its own finish reason."""
    async with running_server(Behaviour(says=ONE)) as server, server.client() as client:
        answer = await client.chat.completions.create(model="echo", messages=MESSAGES, tools=TOOLS)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = calls_of(choice.message)
    assert call.type == "function"
    assert call.id
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}


async def test_text_before_calls_stays_text() -> None:
    """Parallel calls come in order, beside what is said."""
    async with running_server(Behaviour(says=f"Let me see.\n{TWO}")) as server, server.client() as client:
        answer = await client.chat.completions.create(model="echo", messages=MESSAGES, tools=TOOLS)
    (choice,) = answer.choices
    assert (choice.message.content or "").strip() == "Let me see."
    calls = calls_of(choice.message)
    assert [call.function.name for call in calls] == ["weather", "time"]
    assert len({call.id for call in calls}) == 2


async def test_a_stream_has_the_deltas_that_clients_join() -> None:
    """The first delta of a call has its index, id, type and name; the others are pieces of the arguments."""
    async with running_server(Behaviour(says=TWO)) as server, server.client() as client:
        stream = await client.chat.completions.create(
            model="echo", messages=MESSAGES, tools=TOOLS, stream=True
        )
        choices = [chunk.choices[0] async for chunk in stream]
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["tool_calls"]
    deltas = [call for choice in choices for call in choice.delta.tool_calls or ()]
    for index, name, city in ((0, "weather", "Paris"), (1, "time", "Lyon")):
        first, *rest = [delta for delta in deltas if delta.index == index]
        assert first.function is not None
        assert (first.type, first.function.name, first.function.arguments) == ("function", name, "")
        assert first.id
        pieces = [delta.function for delta in rest if delta.function is not None]
        assert len(pieces) == len(rest)
        assert all(delta.id is None for delta in rest)
        assert all(piece.name is None for piece in pieces)
        assert json.loads("".join(piece.arguments or "" for piece in pieces)) == {"city": city}
    assert not "".join(choice.delta.content or "" for choice in choices).strip()


async def test_the_client_joins_a_stream_to_the_whole_answer() -> None:
    """The openai client's own accumulation of a stream gives the message of the whole answer, per choice."""
    says = f"Well.\n{TWO}"
    options: dict[str, Any] = {"model": "echo", "messages": MESSAGES, "tools": TOOLS, "n": 2}
    async with running_server(Behaviour(says=says)) as server, server.client() as client:
        whole = await client.chat.completions.create(**options)
        async with client.chat.completions.stream(**options) as stream:
            joined = await stream.get_final_completion()
    for one, other in zip(whole.choices, joined.choices, strict=True):
        assert one.finish_reason == other.finish_reason == "tool_calls"
        assert one.message.content == other.message.content
        functions = [call.function for call in calls_of(one.message)]
        assert [(each.name, each.arguments) for each in functions] == [
            (each.function.name, each.function.arguments) for each in calls_of(other.message)
        ]


async def test_the_second_round_reaches_the_template() -> None:
    """A transcript with calls continues; arguments are objects, results have their tool's name."""
    messages: list[ChatCompletionMessageParam] = [
        *MESSAGES,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "P"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "rain"}]},
    ]
    async with running_server(Behaviour(says="It rains.")) as server, server.client() as client:
        answer = await client.chat.completions.create(model="echo", messages=messages, tools=TOOLS)
        (seen,) = server.engine.chats
    assert answer.choices[0].message.content == "It rains."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.tool_calls is None
    _, assistant, result = seen.messages
    assert assistant["content"] == ""
    assert assistant["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "P"}}
    assert (result["role"], result["content"], result["name"]) == ("tool", "rain", "weather")
    assert result["tool_call_id"] == "c1"


@pytest.mark.parametrize(
    ("given", "names", "choice"),
    [
        ({}, ["weather", "time"], ToolChoice()),
        ({"tool_choice": None}, ["weather", "time"], ToolChoice()),
        ({"tool_choice": "none"}, ["weather", "time"], ToolChoice(ToolUse.NONE)),
        ({"tool_choice": "required"}, ["weather", "time"], ToolChoice(ToolUse.REQUIRED)),
        (
            {"tool_choice": {"type": "function", "function": {"name": "time"}}},
            ["weather", "time"],
            ToolChoice(ToolUse.REQUIRED, "time"),
        ),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {
                        "mode": "required",
                        "tools": [{"type": "function", "function": {"name": "time"}}],
                    },
                }
            },
            ["time"],
            ToolChoice(ToolUse.REQUIRED),
        ),
    ],
)
async def test_what_the_engine_is_asked(
    server: Server, given: dict[str, object], names: list[str], choice: ToolChoice
) -> None:
    """The tools, and whether they are called."""
    assert (await server.post(CHAT, chat(tools=TOOLS, **given))).status == 200
    (seen,) = server.engine.chats
    assert [each["function"]["name"] for each in seen.tools] == names
    assert seen.tool_choice == choice
    assert seen.parallel_tool_calls
    assert (server.engine.requests[0].sampling.grammar is not None) == (choice.use is ToolUse.REQUIRED)


async def test_without_a_need_to_call_text_is_text() -> None:
    """What looks like a call is text for who forbids calls, or has no tools."""
    async with running_server(Behaviour(says=ONE)) as server:
        asked: list[dict[str, object]] = [
            {"tools": TOOLS, "tool_choice": "none"},
            {"tools": []},
            {"tools": None},
        ]
        for given in asked:
            document = await (await server.post(CHAT, chat(**given))).json()
            assert document["choices"][0]["message"] == {
                "role": "assistant",
                "content": ONE,
                "refusal": None,
            }


async def test_parallel_calls_can_be_forbidden(server: Server) -> None:
    """`parallel_tool_calls` reaches the grammar and the parser."""
    await server.post(CHAT, chat(tools=TOOLS, parallel_tool_calls=False))
    assert not server.engine.chats[0].parallel_tool_calls


async def test_logprobs_of_calls_are_all_there() -> None:
    """Tokens whose text is held back until it is certain come with what follows."""
    body = chat(tools=TOOLS, logprobs=True, stream=True)
    async with running_server(Behaviour(says=ONE)) as server:
        stream = await (await server.post(CHAT, body)).text()
    chunks = [json.loads(line[6:]) for line in stream.split("\n\n") if line.startswith("data: {")]
    logprobs = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    tokens = [token["token"] for entry in logprobs if entry for token in entry["content"]]
    assert "".join(tokens) == ONE


async def test_metrics_count_calls() -> None:
    """The request's finish reason is that of the client."""
    async with running_server(Behaviour(says=ONE)) as server:
        await server.post(CHAT, chat(tools=TOOLS))
        await server.post(CHAT, chat(tools=TOOLS, stream=True))
        metrics = await (await server.get("/metrics")).text()
    (line,) = [
        line for line in metrics.splitlines() if 'finish_reason="tool_calls"' in line and "_total" in line
    ]
    assert line.endswith(" 2.0")


async def test_thoughts_are_no_text() -> None:
    """Where the prompt ends inside a thought, the answer's begins with it; clients know two names for it."""
    messages = [{"role": "user", "content": "Why?<think>"}]
    async with running_server(Behaviour(says="Hm.</think>Because.")) as server:
        document = await (await server.post(CHAT, {"model": "echo", "messages": messages})).json()
        stream = await (
            await server.post(CHAT, {"model": "echo", "messages": messages, "stream": True})
        ).text()
    message = document["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Because.", "Hm.")
    chunks = [json.loads(line[6:]) for line in stream.split("\n\n") if line.startswith("data: {")]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
    assert "".join(delta.get("content") or "" for delta in deltas) == "Because."
