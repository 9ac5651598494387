"""The OpenAI contract, through the real client over a real socket."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletionMessageParam

from tests.proxy.conftest import Server, chat, running_server
from tests.proxy.fake_engine import Behaviour

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]


async def test_chat_completion_answers_whole(server: Server) -> None:
    """A chat completion has one message, its finish reason and the model's name."""
    async with server.client() as client:
        answer = await client.chat.completions.create(model="echo", messages=MESSAGES)
    assert answer.object == "chat.completion"
    assert answer.model == "echo"
    assert answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "hello"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs is None


def num_cached(usage: CompletionUsage | None) -> int | None:
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    return usage.prompt_tokens_details.cached_tokens


def shared(usage: CompletionUsage | None) -> dict[str, Any]:
    """What the server adds to the usage."""
    assert usage is not None
    assert usage.model_extra is not None
    found: dict[str, Any] = usage.model_extra["kvshare"]
    return found


async def test_usage_always_accounts_for_the_prompt(server: Server) -> None:
    """cached_tokens is a number on a miss and on a hit, and the kvshare counts add up to the prompt."""
    async with server.client() as client:
        miss = await client.chat.completions.create(model="echo", messages=MESSAGES)
        hit = await client.chat.completions.create(model="echo", messages=MESSAGES)
    assert num_cached(miss.usage) == 0
    assert shared(miss.usage)["decision"] == "full"
    assert shared(miss.usage)["reason"] == "no_candidates"
    assert (shared(miss.usage)["expected_deviation"], shared(miss.usage)["max_deviation"]) == (None, None)
    assert num_cached(hit.usage) == 10
    assert shared(hit.usage)["decision"] == "exact"
    for usage in (miss.usage, hit.usage):
        assert usage is not None
        counts = [shared(usage)[name] for name in ("exact", "copied", "recomputed", "repaired")]
        assert sum(counts) == usage.prompt_tokens == 11
        assert usage.completion_tokens == 5
        assert usage.total_tokens == 16


async def test_donors_are_never_named(server: Server) -> None:
    """No answer tells which earlier prompt was used."""
    for body in (chat(), chat(stream=True, stream_options={"include_usage": True})):
        response = await server.post("/v1/chat/completions", body)
        assert "4711" not in await response.text()


async def test_chat_stream_has_the_chunks_of_the_contract(server: Server) -> None:
    """Role, contents, an empty delta with the finish reason; one id; no usage unless asked."""
    async with server.client() as client:
        stream = await client.chat.completions.create(model="echo", messages=MESSAGES, stream=True)
        chunks = [chunk async for chunk in stream]
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hello"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * 6
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert chunks[-1].choices[0].delta.content is None
    assert all(chunk.usage is None for chunk in chunks)


async def test_include_usage_adds_one_last_chunk(server: Server) -> None:
    """With include_usage the last chunk has no choices and the usage."""
    async with server.client() as client:
        stream = await client.chat.completions.create(
            model="echo", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * 7
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5
    assert shared(chunks[-1].usage)["decision"] == "full"


async def test_sse_bytes_of_a_stream(server: Server) -> None:
    """The transcript is frames of one data line each, then [DONE], under the headers proxies need."""
    response = await server.post("/v1/chat/completions", chat("a\n\nb", stream=True))
    assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert response.headers["Cache-Control"] == "no-cache"
    assert response.headers["X-Accel-Buffering"] == "no"
    assert "Content-Encoding" not in response.headers
    frames = (await response.read()).split(b"\n\n")
    assert frames[-1] == b""
    assert frames[-2] == b"data: [DONE]"
    assert len(frames) == 8  # role, four characters, end, [DONE], what follows the last frame
    assert all(frame.startswith(b"data: {") and b"\n" not in frame for frame in frames[:-2])


async def test_several_choices_are_told_apart(server: Server) -> None:
    """n choices come whole by index, and in a stream each opens and ends once."""
    async with server.client() as client:
        whole = await client.chat.completions.create(model="echo", messages=MESSAGES, n=3)
        stream = await client.chat.completions.create(model="echo", messages=MESSAGES, n=3, stream=True)
        chunks = [chunk async for chunk in stream]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert {choice.message.content for choice in whole.choices} == {"hello"}
    for index in range(3):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert [choice.delta.role for choice in own].count("assistant") == 1
        assert "".join(choice.delta.content or "" for choice in own) == "hello"
        assert [choice.finish_reason for choice in own].count("stop") == 1


async def test_chat_logprobs(server: Server) -> None:
    """Each token has its bytes, a finite logprob and as many alternatives as asked for."""
    options: dict[str, Any] = {"model": "echo", "messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
    async with server.client() as client:
        whole = await client.chat.completions.create(**options)
        stream = await client.chat.completions.create(**options, stream=True)
        chunks = [chunk async for chunk in stream]
    assert whole.choices[0].logprobs is not None
    tokens = whole.choices[0].logprobs.content
    assert tokens is not None
    assert [token.token for token in tokens] == list("hello")
    assert tokens[0].bytes == [104]
    assert tokens[0].logprob == -9999.0
    assert [top.token for top in tokens[0].top_logprobs] == ["a", "b"]
    streamed = [token for chunk in chunks if (lp := chunk.choices[0].logprobs) for token in lp.content]
    assert streamed == tokens


async def test_stop_and_max_completion_tokens(server: Server) -> None:
    """A stop string ends the answer; max_completion_tokens wins over max_tokens."""
    async with server.client() as client:
        stopped = await client.chat.completions.create(model="echo", messages=MESSAGES, stop="l")
        limited = await client.chat.completions.create(
            model="echo", messages=MESSAGES, max_tokens=4, max_completion_tokens=2
        )
    assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == ("he", "stop")
    assert (limited.choices[0].message.content, limited.choices[0].finish_reason) == ("he", "length")


async def test_sampling_reaches_the_engine(server: Server) -> None:
    """Every parameter arrives as it was sent."""
    async with server.client() as client:
        await client.chat.completions.create(
            model="echo",
            messages=MESSAGES,
            temperature=0,
            top_p=0.5,
            seed=7,
            presence_penalty=1,
            frequency_penalty=-1,
            logit_bias={"5": -100},
            stop=["x", "y"],
        )
    sampling = server.engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.0, 0.5, 7)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.0, -1.0)
    assert (sampling.logit_bias, sampling.stop) == ({5: -100.0}, ("x", "y"))


async def test_content_parts_and_developer_messages(server: Server) -> None:
    """Text parts are joined, and a developer speaks as system."""
    messages: list[ChatCompletionMessageParam] = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]},
    ]
    async with server.client() as client:
        answer = await client.chat.completions.create(model="echo", messages=messages)
    assert answer.choices[0].message.content == "hello"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len("<system>be brief<user>hello")


async def test_unknown_parameters_pass(server: Server) -> None:
    """What clients send beside the contract is no reason to refuse."""
    extra: dict[str, object] = {
        "user": "u1",
        "metadata": {"a": "b"},
        "prompt_cache_key": "k",
        "x_anything": [1],
        "tools": [],
    }
    response = await server.post("/v1/chat/completions", chat(**extra))
    assert response.status == 200


async def test_nul_is_text(server: Server) -> None:
    """A NUL character in a prompt is a character like others."""
    async with server.client() as client:
        answer = await client.chat.completions.create(
            model="echo", messages=[{"role": "user", "content": "a\0b"}]
        )
    assert answer.choices[0].message.content == "a\0b"


async def test_models(server: Server) -> None:
    """The served model is listed, with its context length, and found by its name alone."""
    async with server.client() as client:
        listed = await client.models.list()
        card = await client.models.retrieve("echo")
        with pytest.raises(openai.NotFoundError) as caught:
            await client.models.retrieve("org/other")
    assert [entry.id for entry in listed.data] == ["echo"]
    assert card.to_dict()["max_model_len"] == 1000
    assert caught.value.code == "model_not_found"


async def test_request_id_is_echoed_or_made(server: Server) -> None:
    """A printable id of the client comes back; anything else gets one of the server's."""
    async with server.client() as client:
        raw = await client.chat.completions.with_raw_response.create(
            model="echo", messages=MESSAGES, extra_headers={"X-Request-Id": "trace-1"}
        )
    assert raw.headers["x-request-id"] == "trace-1"
    for bad in ("x" * 129, "a b"):
        response = await server.get("/health", **{"X-Request-Id": bad})
        assert len(response.headers["X-Request-Id"]) == 32


async def test_keep_alive_comments_are_skipped_by_the_client() -> None:
    """While a prompt is prefilled comments flow, and the client sees only its chunks."""
    async with running_server(Behaviour(prefill_s=0.12), server__keep_alive_s=0.03) as server:
        response = await server.post("/v1/chat/completions", chat(stream=True))
        assert (await response.read()).count(b": keep-alive\n\n") >= 2
        async with server.client() as client:
            stream = await client.chat.completions.create(model="echo", messages=MESSAGES, stream=True)
            chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hello"


@pytest.mark.parametrize(
    ("extra", "headers", "asked"),
    [
        ({}, {}, ("approx", True, None)),
        ({"kvshare": {"mode": "off"}}, {}, ("off", True, None)),
        ({"kvshare": {"mode": "exact", "no_store": True}}, {}, ("exact", False, None)),
        ({"kvshare": {"max_deviation": 0.01}}, {}, ("approx", True, 0.01)),
        ({"kvshare": None}, {"Cache-Control": "max-age=0, No-Store"}, ("approx", False, None)),
        ({"kvshare": {"mode": "approx"}}, {"Cache-Control": "no-cache"}, ("off", True, None)),
    ],
)
async def test_a_request_says_how_much_it_shares(
    server: Server,
    extra: dict[str, object],
    headers: dict[str, str],
    asked: tuple[str, bool, float | None],
) -> None:
    """Body and Cache-Control decide about reuse and storage; the stricter of the two wins."""
    response = await server.post("/v1/chat/completions", chat(**extra), **headers)
    assert response.status == 200
    (request,) = server.engine.requests
    assert (request.mode, request.store, request.max_deviation) == asked


async def test_the_settings_say_what_is_shared_by_default() -> None:
    """sharing.mode is what a silent request gets."""
    async with running_server(sharing__mode="exact") as server:
        await server.post("/v1/chat/completions", chat())
    assert server.engine.requests[0].mode == "exact"
