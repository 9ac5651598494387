"""Anthropic's Messages API, through the real client over a real socket."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pydantic
import pytest
from anthropic.types import TextBlock, TextBlockParam, ThinkingBlock, ToolParam, ToolUseBlock
from anthropic.types.beta import BetaTextBlock

from kvshare.conversation.chat import ToolChoice, ToolUse
from tests.proxy.conftest import Server, key_of, running_server
from tests.proxy.fake_engine import Behaviour

MESSAGES = "/v1/messages"
ASK: dict[str, Any] = {
    "model": "echo",
    "max_tokens": 400,
    "messages": [{"role": "user", "content": "hello"}],
}


def tool(name: str) -> ToolParam:
    schema: dict[str, object] = {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    }
    return {"name": name, "description": f"The {name} of a city", "input_schema": schema}


def call_text(name: str, city: str) -> str:
    """A call as the fake engine's model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {'city': city}})}\n</tool_call>"


TOOLS: list[ToolParam] = [{**tool("weather"), "cache_control": {"type": "ephemeral"}}, tool("time")]
ONE = call_text("weather", "Paris")
TWO = f"{ONE}\n{call_text('time', 'Lyon')}"


def text_of(block: object) -> str:
    assert isinstance(block, TextBlock | BetaTextBlock)
    return block.text


def use_of(block: object) -> ToolUseBlock:
    assert isinstance(block, ToolUseBlock)
    return block


async def test_a_message_answers_whole(server: Server) -> None:
    """A message has one block of text, why it ended and its request's id."""
    async with server.anthropic() as client:
        answer = await client.messages.create(**ASK)
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "echo")
    assert answer.id.startswith("msg_")
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": "hello"}]
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert answer._request_id


async def test_usage_divides_the_prompt(server: Server) -> None:
    """Tokens read from the cache are no input tokens, as with Anthropic; `kvshare` is in it, too."""
    async with server.anthropic() as client:
        miss = await client.messages.create(**ASK)
        hit = await client.messages.create(**ASK)
    assert (miss.usage.input_tokens, miss.usage.cache_read_input_tokens) == (11, 0)
    assert hit.usage.cache_read_input_tokens == 10
    for usage in (miss.usage, hit.usage):
        assert usage.input_tokens + usage.cache_read_input_tokens == 11
        assert (usage.cache_creation_input_tokens, usage.output_tokens) == (0, 5)
    assert miss.usage.kvshare["decision"] == "full"
    assert hit.usage.kvshare["decision"] == "exact"


async def test_the_events_of_a_stream(server: Server) -> None:
    """Each event has its name; the first has the input's usage, the last but one the output's."""
    response = await server.post(MESSAGES, {**ASK, "stream": True})
    assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    frames = (await response.text()).split("\n\n")
    assert frames.pop() == ""
    lines = [frame.split("\n") for frame in frames]
    events = [json.loads(data.removeprefix("data: ")) for _, data in lines]
    assert [name.removeprefix("event: ") for name, _ in lines] == [event["type"] for event in events]
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 5,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    first, last = events[0]["message"], events[-2]
    assert first["content"] == []
    assert (first["usage"]["input_tokens"], first["usage"]["output_tokens"]) == (11, 0)
    assert last["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert (last["usage"]["input_tokens"], last["usage"]["output_tokens"]) == (11, 5)


async def test_a_stream_adds_up_to_the_whole(server: Server) -> None:
    """The client's own accumulator reads the same message from the stream, tool uses included."""
    body = {**ASK, "tools": TOOLS}
    async with running_server(Behaviour(says=f"I look.\n{TWO}")) as running, running.anthropic() as client:
        whole = await client.messages.create(**body)
        async with client.messages.stream(**body) as stream:
            streamed = await stream.get_final_message()
    for message in (whole, streamed):
        text, uses = text_of(message.content[0]), [use_of(block) for block in message.content[1:]]
        assert text.strip() == "I look."
        assert [(use.name, use.input) for use in uses] == [
            ("weather", {"city": "Paris"}),
            ("time", {"city": "Lyon"}),
        ]
        assert len({use.id for use in uses}) == 2
        assert message.stop_reason == "tool_use"
        assert message.usage.output_tokens == len(f"I look.\n{TWO}")


async def test_arguments_stream_in_pieces() -> None:
    """The input of a tool comes as it is written, and its pieces are the JSON text of it."""
    async with running_server(Behaviour(says=ONE)) as server, server.anthropic() as client:
        stream = await client.messages.create(**ASK, tools=TOOLS, stream=True)
        events = [event async for event in stream]
    deltas = [event.delta for event in events if event.type == "content_block_delta"]
    assert len(deltas) > 3
    pieces = [delta.partial_json for delta in deltas if delta.type == "input_json_delta"]
    assert len(pieces) == len(deltas)
    assert json.loads("".join(pieces)) == {"city": "Paris"}


async def test_two_rounds_of_tools() -> None:
    """A tool's results come back as the template's tool messages, with the names of the tools."""
    async with running_server(Behaviour(says=TWO)) as server, server.anthropic() as client:
        first = await client.messages.create(**ASK, tools=TOOLS)
        results: list[dict[str, Any]] = [
            {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "fine"}]}
            for use in map(use_of, first.content)
        ]
        results[1] |= {"is_error": True, "content": "no clock"}
        server.engine.behaviour.says = "It is fine."
        history = [*ASK["messages"], {"role": "assistant", "content": first.content}]
        last = {"role": "user", "content": [*results, {"type": "text", "text": "And?"}]}
        second = await client.messages.create(**{**ASK, "messages": [*history, last]}, tools=TOOLS)
    assert text_of(second.content[0]) == "It is fine."
    assistant, weather, time, user = server.engine.chats[-1].messages[1:]
    assert [call["function"] for call in assistant["tool_calls"]] == [
        {"name": "weather", "arguments": {"city": "Paris"}},
        {"name": "time", "arguments": {"city": "Lyon"}},
    ]
    assert (weather["role"], weather["name"], weather["content"]) == ("tool", "weather", "fine")
    assert weather["tool_call_id"] == assistant["tool_calls"][0]["id"]
    assert (time["name"], time["content"]) == ("time", "Error: no clock")
    assert (user["role"], user["content"]) == ("user", "And?")


async def test_what_the_template_gets(server: Server) -> None:
    """System blocks and neighbours of one role are one message each; thoughts are dropped."""
    system: list[TextBlockParam] = [
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
    ]
    thought = {"type": "thinking", "thinking": "hm", "signature": "x"}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
        {"role": "assistant", "content": [thought, {"type": "text", "text": "d"}]},
        {"role": "user", "content": "e"},
    ]
    system.append({"type": "text", "text": "Be kind."})
    async with server.anthropic() as client:
        await client.messages.create(**{**ASK, "messages": messages}, system=system)
    (chat,) = server.engine.chats
    assert [(message["role"], message["content"]) for message in chat.messages] == [
        ("system", "Be brief.\nBe kind."),
        ("user", "a\nb\nc"),
        ("assistant", "d"),
        ("user", "e"),
    ]
    assert not chat.continue_final_message


async def test_an_answer_that_is_begun_is_continued(server: Server) -> None:
    """A last message of the assistant is the beginning of the answer."""
    begun = [*ASK["messages"], {"role": "assistant", "content": "The answer is ("}]
    async with server.anthropic() as client:
        await client.messages.create(**{**ASK, "messages": begun})
    assert server.engine.chats[0].continue_final_message


@pytest.mark.parametrize(
    ("given", "expected", "parallel"),
    [
        ({"type": "auto"}, ToolChoice(), True),
        ({"type": "any", "disable_parallel_tool_use": True}, ToolChoice(ToolUse.REQUIRED), False),
        ({"type": "tool", "name": "time"}, ToolChoice(ToolUse.REQUIRED, "time"), True),
        ({"type": "none"}, ToolChoice(ToolUse.NONE), True),
    ],
)
async def test_the_choice_of_tools(
    server: Server, given: dict[str, Any], expected: ToolChoice, parallel: bool
) -> None:
    """Each choice becomes the chat's."""
    response = await server.post(MESSAGES, {**ASK, "tools": TOOLS, "tool_choice": given})
    assert response.status == 200
    (chat,) = server.engine.chats
    assert (chat.tool_choice, chat.parallel_tool_calls) == (expected, parallel)
    assert [tool["function"]["name"] for tool in chat.tools] == ["weather", "time"]
    assert chat.tools[0]["function"]["parameters"] == TOOLS[0]["input_schema"]


async def test_sampling_parameters(server: Server) -> None:
    """What Anthropic has of them reaches the engine."""
    body = {**ASK, "max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "stop_sequences": ["xx"]}
    assert (await server.post(MESSAGES, body)).status == 200
    sampling = server.engine.requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (7, 0.5, 0.9, 3)
    assert sampling.stop == ("xx",)


@pytest.mark.parametrize("stream", [False, True])
async def test_why_it_stopped(server: Server, stream: bool) -> None:
    """The stop sequence that matched is named; the token limit is a reason of its own."""

    async def ending(**extra: object) -> tuple[str | None, str | None, str]:
        async with server.anthropic() as client:
            if not stream:
                answer = await client.messages.create(**{**ASK, **extra})
            else:
                async with client.messages.stream(**{**ASK, **extra}) as events:
                    answer = await events.get_final_message()
        return answer.stop_reason, answer.stop_sequence, text_of(answer.content[0])

    assert await ending(stop_sequences=["zz", "lo"]) == ("stop_sequence", "lo", "hel")
    assert await ending(stop_sequences=["h"]) == ("stop_sequence", "h", "")
    assert await ending(max_tokens=2) == ("max_tokens", None, "he")


async def test_a_call_that_is_cut_off() -> None:
    """Whole and streamed it has what is there of its input, and says that tokens ran out."""
    body = {**ASK, "tools": TOOLS, "max_tokens": len(ONE) - 16}
    async with running_server(Behaviour(says=ONE)) as server, server.anthropic() as client:
        whole = await client.messages.create(**body)
        async with client.messages.stream(**body) as stream:
            streamed = await stream.get_final_message()
    assert whole.stop_reason == streamed.stop_reason == "max_tokens"
    assert use_of(whole.content[0]).input == use_of(streamed.content[0]).input


@pytest.mark.parametrize("number", ["1e400", "-1e400", "2.5E+999"])
async def test_a_number_beyond_all_floats_is_null(number: str) -> None:
    """As JSON has no infinity, and an answer must be JSON."""
    says = ONE.replace('"Paris"', f'{{"at": [{number}, 1]}}')
    body = {**ASK, "tools": TOOLS}
    async with running_server(Behaviour(says=says)) as server:
        response = await server.http.post(f"{server.url}/v1/messages", json=body)
        text = await response.text()
    assert json.loads(text, parse_constant=pytest.fail)["content"][0]["input"] == {"city": {"at": [None, 1]}}


async def test_thoughts_are_blocks_of_their_own() -> None:
    """What a reasoning model thinks comes as a thinking block before the text."""
    says = "<think>\nHm.\n</think>\n\nYes."
    async with running_server(Behaviour(says=says)) as server, server.anthropic() as client:
        whole = await client.messages.create(**ASK, thinking={"type": "adaptive"})
        async with client.messages.stream(**ASK) as stream:
            streamed = await stream.get_final_message()
    for message in (whole, streamed):
        thought, text = message.content
        assert isinstance(thought, ThinkingBlock)
        assert (thought.type, thought.thinking.strip()) == ("thinking", "Hm.")
        assert text_of(text) == "Yes."
    assert [chat.template_kwargs for chat in server.engine.chats] == [{"enable_thinking": True}, {}]


class Capital(pydantic.BaseModel):
    name: str


async def test_an_answer_of_a_schema() -> None:
    """`output_format` of the client is the schema that the answer must follow."""
    async with running_server(Behaviour(says='{"name": "Paris"}')) as server, server.anthropic() as client:
        answer = await client.messages.parse(**ASK, output_format=Capital)
    assert answer.parsed_output == Capital(name="Paris")
    schema = server.engine.chats[0].answer_schema
    assert schema is not None
    assert schema["properties"].keys() == {"name"}


async def test_counting_tokens(server: Server) -> None:
    """The count is that of the prompt that a message would have; nothing is generated."""
    async with server.anthropic() as client:
        count = await client.messages.count_tokens(model="echo", messages=ASK["messages"])
        answer = await client.messages.create(**ASK)
    assert count.input_tokens == answer.usage.input_tokens == 11
    assert len(server.engine.requests) == 1


async def test_keys_as_anthropic_sends_them(guarded: Server) -> None:
    """`x-api-key` is the key; a beta client's query and headers change nothing."""
    async with guarded.anthropic(key_of("alice")) as client:
        answer = await client.beta.messages.create(**ASK, betas=["x-2026-01-01"])
    assert text_of(answer.content[0]) == "hello"


async def test_what_hints_passes(server: Server) -> None:
    """Parameters without a meaning here, and null for what is not given, are no errors."""
    body = {
        **ASK,
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "cache_control": {"type": "ephemeral"},
        "context_management": {"edits": []},
        "thinking": {"type": "enabled", "budget_tokens": 2048},
        "output_config": {"effort": "high", "format": None},
        "stop_sequences": None,
        "tools": None,
        "system": None,
    }
    assert (await server.post(MESSAGES, body)).status == 200
    assert server.engine.chats[0].template_kwargs == {"enable_thinking": True, "reasoning_effort": "high"}


async def test_plan_headers(server: Server) -> None:
    """The headers that say what was planned are on these answers, too, and Anthropic's request id."""
    response = await server.post(MESSAGES, ASK, **{"X-Request-Id": "trace-1"})
    assert response.headers["X-KVShare-Decision"] == "full"
    assert response.headers["request-id"] == "trace-1"


async def test_the_kvshare_object(server: Server) -> None:
    """`kvshare` in the body decides about sharing and storing, as on the chat routes."""
    body = {**ASK, "kvshare": {"mode": "off", "no_store": True}}
    assert (await server.post(MESSAGES, body)).status == 200
    (request,) = server.engine.requests
    assert (request.mode, request.store) == ("off", False)


async def test_pings_while_there_is_nothing_to_say() -> None:
    """A slow prefill sends Anthropic's ping, which clients skip."""
    behaviour = Behaviour(prefill_s=0.2)
    async with running_server(behaviour, server__keep_alive_s=0.05) as server:
        response = await server.post(MESSAGES, {**ASK, "stream": True})
        assert 'event: ping\ndata: {"type":"ping"}\n\n' in await response.text()
        async with server.anthropic() as client, client.messages.stream(**ASK) as stream:
            assert await stream.get_final_text() == "hello"


@pytest.mark.parametrize("behaviour", [Behaviour(fail_after_tokens=2), Behaviour(end_early=True)])
async def test_a_stream_that_fails_says_so(behaviour: Behaviour) -> None:
    """The last event is an error, which the client raises; there is no message_stop."""
    async with running_server(behaviour) as server:
        response = await server.post(MESSAGES, {**ASK, "stream": True}, **{"X-Request-Id": "trace-1"})
        *_, last, end = (await response.text()).split("\n\n")
        async with server.anthropic() as client, client.messages.stream(**ASK) as stream:
            with pytest.raises(anthropic.APIStatusError) as caught:
                await stream.until_done()
    assert end == ""
    name, data = last.split("\n")
    assert name == "event: error"
    error = json.loads(data.removeprefix("data: "))
    assert (error["type"], error["error"]["type"], error["request_id"]) == ("error", "api_error", "trace-1")
    assert "SECRET" not in await response.text()
    assert "message_stop" not in await response.text()
    assert caught.value.type == "api_error"


async def test_a_client_that_closes_the_stream_frees_its_slot() -> None:
    """Leaving the client's stream after the first event is enough."""
    async with running_server(Behaviour(token_s=0.05)) as server, server.anthropic() as client:
        ask = {**ASK, "messages": [{"role": "user", "content": "x" * 200}]}
        async with client.messages.stream(**ask) as stream:
            await anext(aiter(stream))
        await server.engine.freed.wait()
        assert server.engine.num_running == 0
