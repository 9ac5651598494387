"""OpenAI's Responses API, through the real client over a real socket."""

from __future__ import annotations

import pydantic
from openai.types.responses import ResponseReasoningItem

from tests.proxy.conftest import Server, running_server
from tests.proxy.fake_engine import Behaviour
from tests.proxy.generate.responses_api import ASK, RESPONSES, events_of


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
