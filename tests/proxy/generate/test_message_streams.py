"""Streams of Anthropic's Messages API: their events, pings, and ends."""

from __future__ import annotations

import json

import anthropic
import pytest

from tests.proxy.conftest import Server, running_server
from tests.proxy.fake_engine import Behaviour
from tests.proxy.generate.messages_api import ASK, MESSAGES, TOOLS, TWO, text_of, use_of


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
