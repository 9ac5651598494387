"""Anthropic's Messages API, through the real client over a real socket."""

from __future__ import annotations

import pydantic
import pytest
from anthropic.types import TextBlockParam, ThinkingBlock

from tests.proxy.conftest import Server, key_of, running_server
from tests.proxy.fake_engine import Behaviour
from tests.proxy.generate.messages_api import ASK, MESSAGES, text_of


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
