"""Streams of OpenAI's Responses API: their events and ends."""

from __future__ import annotations

import json

import openai
import pytest
from openai.types.responses import ResponseFunctionToolCall

from tests.proxy.conftest import Server, running_server
from tests.proxy.fake_engine import Behaviour
from tests.proxy.generate.responses_api import ASK, TOOLS, TWO, events_of


def call_of(item: object) -> ResponseFunctionToolCall:
    assert isinstance(item, ResponseFunctionToolCall)
    return item


async def test_the_events_of_a_text(server: Server) -> None:
    """The events come in OpenAI's order, numbered, and the last has the whole response."""
    events = await events_of(server)
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * 5,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []
    item_ids = {event["item_id"] for event in events if "item_id" in event}
    assert item_ids == {events[2]["item"]["id"]}
    last = events[-1]["response"]
    assert last["output"] == [events[-2]["item"]]
    assert last["output"][0]["content"][0]["text"] == events[-4]["text"] == "hello"
    assert last["usage"]["kvshare"]["decision"] == "full"


async def test_a_stream_adds_up_to_the_whole() -> None:
    """The client's own accumulator reads the same response from the stream, calls included."""
    async with running_server(Behaviour(says=f"I look.\n{TWO}")) as server, server.client() as client:
        whole = await client.responses.create(**ASK, tools=TOOLS)
        async with client.responses.stream(**ASK, tools=TOOLS) as stream:
            streamed = await stream.get_final_response()
    for answer in (whole, streamed):
        assert answer.output_text.strip() == "I look."
        calls = [call_of(item) for item in answer.output[1:]]
        assert [(call.type, call.name, json.loads(call.arguments)) for call in calls] == [
            ("function_call", "weather", {"city": "Paris"}),
            ("function_call", "time", {"city": "Lyon"}),
        ]
        assert len({call.call_id for call in calls}) == len({call.id for call in calls}) == 2
        assert {item.to_dict()["status"] for item in answer.output} == {"completed"}
        assert answer.usage is not None
        assert answer.usage.output_tokens == len(f"I look.\n{TWO}")


@pytest.mark.parametrize("behaviour", [Behaviour(fail_after_tokens=2), Behaviour(end_early=True)])
async def test_a_stream_that_fails_says_so(behaviour: Behaviour) -> None:
    """An error event, which the client raises, then the failed response with what there is of it."""
    async with running_server(behaviour) as server:
        *_, error, failed = await events_of(server)
        async with server.client() as client, client.responses.stream(**ASK) as stream:
            with pytest.raises(openai.APIError) as caught:
                await stream.until_done()
    assert (error["type"], error["code"]) == ("error", "engine_error")
    assert "SECRET" not in json.dumps([error, failed])
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"]["message"] == error["message"]
    assert caught.value.code == "engine_error"


async def test_a_broken_item_is_incomplete() -> None:
    """The text that came before a failure is in the failed response, as an incomplete item."""
    async with running_server(Behaviour(fail_after_tokens=2)) as server:
        failed = (await events_of(server))[-1]["response"]
    (item,) = failed["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "he")


async def test_a_client_that_closes_the_stream_frees_its_slot() -> None:
    """Leaving the client's stream after the first event is enough."""
    async with running_server(Behaviour(token_s=0.05)) as server, server.client() as client:
        stream = await client.responses.create(model="echo", input="x" * 200, stream=True)
        await anext(aiter(stream))
        await stream.close()
        await server.engine.freed.wait()
        assert server.engine.num_running == 0
