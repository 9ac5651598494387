"""OpenAI's Responses API, through the real client over a real socket."""

from __future__ import annotations

import json
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import ResponseFunctionToolCall, ResponseReasoningItem

from kvshare.conversation.chat import ToolChoice, ToolUse
from tests.proxy.conftest import Server, running_server
from tests.proxy.fake_engine import Behaviour

RESPONSES = "/v1/responses"
ASK: dict[str, Any] = {"model": "echo", "input": "hello"}


def tool(name: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    return {"type": "function", "name": name, "description": f"The {name}", "parameters": schema}


def call_text(name: str, city: str) -> str:
    """A call as the fake engine's model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {'city': city}})}\n</tool_call>"


TOOLS: list[Any] = [tool("weather"), tool("time")]  # without `strict`, which the client's type asks for
ONE = call_text("weather", "Paris")
TWO = f"{ONE}\n{call_text('time', 'Lyon')}"


def call_of(item: object) -> ResponseFunctionToolCall:
    assert isinstance(item, ResponseFunctionToolCall)
    return item


async def events_of(server: Server, **extra: object) -> list[dict[str, Any]]:
    """The events of a stream, whose frames are checked."""
    response = await server.post(RESPONSES, {**ASK, **extra, "stream": True})
    assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    *frames, end = (await response.text()).split("\n\n")
    assert end == ""
    events = []
    for name, data in (frame.split("\n") for frame in frames):
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


async def test_a_response_answers_whole(server: Server) -> None:
    """A response has one message, its status and what was asked for."""
    async with server.client() as client:
        answer = await client.responses.create(**ASK, instructions="Be brief.", metadata={"a": "b"})
    assert (answer.object, answer.model, answer.status) == ("response", "echo", "completed")
    assert answer.id.startswith("resp_")
    assert answer.output_text == "hello"
    (message,) = answer.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert message.id.startswith("msg_")
    assert (answer.error, answer.incomplete_details, answer.previous_response_id) == (None, None, None)
    assert (answer.instructions, answer.metadata) == ("Be brief.", {"a": "b"})
    assert (answer.tool_choice, answer.tools, answer.parallel_tool_calls) == ("auto", [], True)
    assert answer.text.format.type == "text"


async def test_nothing_is_said_to_be_stored(server: Server) -> None:
    """`store` is accepted, and the response says that it was not done."""
    for store in (True, False):
        response = await server.post(RESPONSES, {**ASK, "store": store})
        assert (await response.json())["store"] is False


async def test_usage_always_accounts_for_the_prompt(server: Server) -> None:
    """cached_tokens is a number on a miss and on a hit; `kvshare` is beside it."""
    async with server.client() as client:
        miss = (await client.responses.create(**ASK)).usage
        hit = (await client.responses.create(**ASK)).usage
    assert (miss.input_tokens_details.cached_tokens, hit.input_tokens_details.cached_tokens) == (0, 10)
    assert (miss.kvshare["decision"], hit.kvshare["decision"]) == ("full", "exact")
    for usage in (miss, hit):
        assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (11, 5, 16)
        assert usage.output_tokens_details.reasoning_tokens == 0


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


async def test_the_events_of_calls() -> None:
    """The arguments of a call come as they are written, in an item of its own."""
    async with running_server(Behaviour(says=TWO)) as server:
        events = await events_of(server, tools=TOOLS)
    for index in (0, 1):
        own = [event for event in events if event.get("output_index") == index]
        added, *deltas, written, done = own
        assert added["item"]["arguments"] == ""
        assert {event["type"] for event in deltas} == {"response.function_call_arguments.delta"}
        assert len(deltas) > 3
        assert "".join(event["delta"] for event in deltas) == written["arguments"]
        assert done["item"]["arguments"] == written["arguments"]
        for key in ("id", "call_id", "name"):
            assert done["item"][key] == added["item"][key]


async def test_two_rounds_of_tools() -> None:
    """Output and results sent back as input become the template's messages."""
    async with running_server(Behaviour(says=f"I look.\n{TWO}")) as server, server.client() as client:
        first = await client.responses.create(**ASK, tools=TOOLS)
        calls = [item for item in first.output if item.type == "function_call"]
        outputs = [
            {"type": "function_call_output", "call_id": call.call_id, "output": f"{call.name} is fine"}
            for call in calls
        ]
        server.engine.behaviour.says = "It is fine."
        history: list[Any] = [{"role": "user", "content": "hello"}, *first.output, *outputs]
        second = await client.responses.create(model="echo", input=history, tools=TOOLS)
    assert second.output_text == "It is fine."
    user, assistant, weather, time = server.engine.chats[-1].messages
    assert (user["role"], user["content"]) == ("user", "hello")
    assert assistant["content"].strip() == "I look."
    assert [call["function"] for call in assistant["tool_calls"]] == [
        {"name": "weather", "arguments": {"city": "Paris"}},
        {"name": "time", "arguments": {"city": "Lyon"}},
    ]
    assert (weather["role"], weather["name"], weather["content"]) == ("tool", "weather", "weather is fine")
    assert (time["tool_call_id"], time["content"]) == (calls[1].call_id, "time is fine")


async def test_what_the_template_gets(server: Server) -> None:
    """Instructions and developers are the system; reasoning is dropped; every kind of text part is read."""
    given = [
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "id": "msg_1"},
        {"role": "user", "content": "b"},
    ]
    response = await server.post(RESPONSES, {**ASK, "input": given, "instructions": "Be brief."})
    assert response.status == 200
    (chat,) = server.engine.chats
    assert [(message["role"], message["content"]) for message in chat.messages] == [
        ("system", "Be brief.\nBe kind."),
        ("user", "a"),
        ("assistant", "no"),
        ("user", "b"),
    ]


@pytest.mark.parametrize(
    ("choice", "expected", "names"),
    [
        ("none", ToolChoice(ToolUse.NONE), ["weather", "time"]),
        ("required", ToolChoice(ToolUse.REQUIRED), ["weather", "time"]),
        ({"type": "function", "name": "time"}, ToolChoice(ToolUse.REQUIRED, "time"), ["weather", "time"]),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "time"}]},
            ToolChoice(),
            ["time"],
        ),
    ],
)
async def test_the_choice_of_tools(
    server: Server, choice: object, expected: ToolChoice, names: list[str]
) -> None:
    """Each choice becomes the chat's, and the response repeats it."""
    body = {**ASK, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    response = await server.post(RESPONSES, body)
    assert response.status == 200
    assert (await response.json())["tool_choice"] == choice
    (chat,) = server.engine.chats
    assert (chat.tool_choice, chat.parallel_tool_calls) == (expected, False)
    assert [tool["function"]["name"] for tool in chat.tools] == names
    assert chat.tools[-1]["function"]["parameters"] == TOOLS[-1]["parameters"]


async def test_tools_are_as_in_chats(server: Server) -> None:
    """A flat tool becomes a chat's; what is not given is not there, strict only where it is asked for."""
    tools = [{"type": "function", "name": "time"}, {**TOOLS[0], "strict": True, "defer_loading": False}]
    assert (await server.post(RESPONSES, {**ASK, "tools": tools})).status == 200
    time, weather = (tool["function"] for tool in server.engine.chats[0].tools)
    assert time == {"name": "time", "parameters": {"type": "object", "properties": {}}}
    assert weather == {key: tools[1][key] for key in ("name", "description", "parameters", "strict")}


async def test_sampling_parameters(server: Server) -> None:
    """What this API has of them reaches the engine."""
    body = {**ASK, "max_output_tokens": 7, "temperature": 0.5, "top_p": 0.9}
    response = await server.post(RESPONSES, body)
    sampling = server.engine.requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (7, 0.5, 0.9)
    assert (await response.json()).items() >= {key: body[key] for key in list(body)[2:]}.items()


async def test_the_token_limit_makes_it_incomplete(server: Server) -> None:
    """An answer that was cut off is incomplete, its last item, too, and its stream ends so."""
    async with server.client() as client:
        answer = await client.responses.create(**ASK, max_output_tokens=2)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.output_text, answer.output[0].status) == ("he", "incomplete")
    last = (await events_of(server, max_output_tokens=2))[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_reasoning_is_an_item_of_its_own() -> None:
    """Thoughts come before the message, with their tokens counted."""
    says = "<think>\nHm.\n</think>\n\nYes."
    async with running_server(Behaviour(says=says)) as server, server.client() as client:
        whole = await client.responses.create(**ASK, reasoning={"effort": "low", "summary": "auto"})
        async with client.responses.stream(**ASK, reasoning={"effort": "none"}) as stream:
            events = [event async for event in stream]
    last = events[-1]
    assert last.type == "response.completed"
    for answer in (whole, last.response):
        thought, _ = answer.output
        assert isinstance(thought, ResponseReasoningItem)
        assert thought.content is not None
        assert answer.usage is not None
        assert (thought.type, thought.summary) == ("reasoning", [])
        assert thought.content[0].text.strip() == "Hm."
        assert answer.output_text == "Yes."
        assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens
    assert "response.reasoning_text.done" in [event.type for event in events]
    assert [chat.template_kwargs for chat in server.engine.chats] == [
        {"reasoning_effort": "low", "enable_thinking": True},
        {"reasoning_effort": "none", "enable_thinking": False},
    ]


class Capital(pydantic.BaseModel):
    name: str


async def test_an_answer_of_a_schema() -> None:
    """`text_format` of the client is the schema that the answer must follow."""
    async with running_server(Behaviour(says='{"name": "Paris"}')) as server, server.client() as client:
        parsed = await client.responses.parse(**ASK, text_format=Capital)
        async with client.responses.stream(**ASK, text_format=Capital) as stream:
            streamed = await stream.get_final_response()
        await client.responses.create(**ASK, text={"format": {"type": "json_object"}})
    assert parsed.output_parsed == streamed.output_parsed == Capital(name="Paris")
    first, _, last = server.engine.chats
    assert first.answer_schema is not None
    assert first.answer_schema["properties"].keys() == {"name"}
    assert last.answer_schema == {"type": "object"}


async def test_an_empty_answer_is_a_message(server: Server) -> None:
    """An answer without any text has a message, which is empty."""
    events = await events_of(server, input=[{"role": "user", "content": ""}])
    (item,) = events[-1]["response"]["output"]
    assert item["content"][0]["text"] == ""
    assert [event["type"] for event in events].count("response.output_item.done") == 1


async def test_what_hints_passes(server: Server) -> None:
    """Parameters without a meaning here, and null for what is not given, are no errors."""
    body = {
        **ASK,
        "store": True,
        "user": "u",
        "include": ["reasoning.encrypted_content"],
        "truncation": "auto",
        "prompt_cache_key": "k",
        "service_tier": "auto",
        "stream_options": {"include_obfuscation": False},
        "previous_response_id": None,
        "conversation": None,
        "background": False,
        "top_logprobs": 0,
        "tools": None,
        "reasoning": None,
        "text": {"verbosity": "low"},
    }
    response = await server.post(RESPONSES, body)
    assert response.status == 200
    assert (await response.json())["truncation"] == "disabled"


async def test_the_kvshare_object(server: Server) -> None:
    """`kvshare` in the body decides about sharing and storing, and the headers say what was planned."""
    response = await server.post(RESPONSES, {**ASK, "kvshare": {"mode": "off", "no_store": True}})
    (request,) = server.engine.requests
    assert (request.mode, request.store) == ("off", False)
    assert response.headers["X-KVShare-Decision"] == "full"


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
