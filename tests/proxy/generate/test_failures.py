"""When an answer cannot be finished: the engine fails in the middle, or the client goes away."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re

import openai
import pytest
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessageParam

from kvshare.errors import EngineError
from tests.proxy.conftest import Server, chat, eventually, running_server
from tests.proxy.fake_engine import Behaviour

CHAT = "/v1/chat/completions"
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    "failure", [EngineError("cuda fell over"), RuntimeError("SECRET"), ConnectionError("SECRET")]
)
async def test_a_stream_that_fails_says_so(failure: Exception) -> None:
    """The text so far, an error frame, then [DONE]: never a bare end, which looks like success."""
    async with running_server(Behaviour(fail_after_tokens=2, failure=failure)) as server:
        response = await server.post(CHAT, chat(stream=True))
        frames = (await response.text()).split("\n\n")
    assert response.status == 200
    assert frames[-2:] == ["data: [DONE]", ""]
    error = json.loads(frames[-3].removeprefix("data: "))["error"]
    assert error["type"] == "server_error"
    assert error["code"] == "engine_error"
    assert "SECRET" not in error["message"]
    assert '"finish_reason":"' not in "".join(frames)


async def test_the_client_raises_when_a_stream_fails() -> None:
    """The openai client turns the error frame into an exception, after the text that came."""
    texts = []

    async def read(stream: openai.AsyncStream[ChatCompletionChunk]) -> None:
        async for chunk in stream:
            texts.append(chunk.choices[0].delta.content or "")

    async with running_server(Behaviour(fail_after_tokens=2)) as server, server.client() as client:
        stream = await client.chat.completions.create(model="echo", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError) as caught:
            await read(stream)
    assert "".join(texts) == "he"
    assert caught.value.code == "engine_error"


async def test_an_answer_that_fails_is_500() -> None:
    """Without streaming a failure in the middle is a plain 500, and the slot is free."""
    async with running_server(Behaviour(fail_after_tokens=2)) as server:
        response = await server.post(CHAT, chat())
        assert response.status == 500
        assert server.engine.num_running == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_just_ends_is_a_failure(stream: bool) -> None:
    """An engine that ends without its last event does not pass for a finished answer."""
    async with running_server(Behaviour(end_early=True)) as server:
        response = await server.post(CHAT, chat(stream=stream))
        assert '"engine_error"' in (await response.text()).replace(" ", "")


async def test_one_prompt_of_several_fails() -> None:
    """If one prompt of a list is refused, the request is, and none keeps a slot."""
    async with running_server() as server:
        response = await server.post("/v1/completions", {"model": "echo", "prompt": ["a", "x" * 1200]})
        assert response.status == 400
        assert server.engine.num_running == 0


async def test_failures_are_logged_without_text(caplog: pytest.LogCaptureFixture) -> None:
    """The log names the error's class and place; what the error or the prompt says stays out."""
    caplog.set_level(logging.INFO)
    async with running_server(Behaviour(fail_after_tokens=0)) as server:
        await server.post(CHAT, chat("TOPSECRET"))
    assert "RuntimeError" in caplog.text
    assert "fake_engine.py" in caplog.text
    assert "SECRET" not in caplog.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "behaviour",
    [Behaviour(plan_s=30), Behaviour(prefill_s=30), Behaviour(token_s=0.3)],
    ids=["planning", "prefilling", "decoding"],
)
async def test_a_client_that_goes_away_frees_its_slot(behaviour: Behaviour, stream: bool) -> None:
    """Whatever the request was doing, its generator is closed within a second of the disconnect."""
    async with running_server(behaviour) as server:
        asking = asyncio.create_task(server.post(CHAT, chat("x" * 100, stream=stream)))
        await asyncio.wait_for(server.engine.running.wait(), 20)
        await asyncio.sleep(0.02)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        await asyncio.wait_for(server.engine.freed.wait(), 20)
        await eventually(lambda: server.lifecycle.num_running == 0)
        assert server.engine.num_running == 0


async def test_a_client_that_goes_away_while_it_waits_leaves_the_queue() -> None:
    """A request that has no slot yet stops waiting for one."""
    async with running_server(Behaviour(prefill_s=30, max_running=1)) as server:
        tasks = [asyncio.create_task(server.post(CHAT, chat())) for _ in range(2)]
        await eventually(lambda: server.engine.num_waiting == 1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await eventually(lambda: server.engine.num_waiting == server.engine.num_running == 0)


async def test_a_disconnect_storm_leaves_nothing_behind() -> None:
    """Twenty clients that leave at different moments keep no slot, no task and no place in the count."""
    async with running_server(Behaviour(token_s=0.01, max_waiting=20)) as server:
        bodies = [chat("x" * 50, stream=number % 2 == 0) for number in range(20)]
        tasks = [asyncio.create_task(server.post(CHAT, body)) for body in bodies]
        for task in tasks:
            await asyncio.sleep(0.005)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await eventually(lambda: server.lifecycle.num_running == 0)
        assert (server.engine.num_running, server.engine.num_waiting) == (0, 0)
        assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("generate")]
        assert (await server.post(CHAT, chat())).status == 200


async def test_a_client_that_closes_the_stream_frees_its_slot() -> None:
    """Closing the openai client's stream after the first chunk is enough."""
    async with running_server(Behaviour(token_s=0.5)) as server, server.client() as client:
        stream = await client.chat.completions.create(
            model="echo", messages=[{"role": "user", "content": "x" * 200}], stream=True
        )
        await anext(aiter(stream))
        await stream.close()
        await asyncio.wait_for(server.engine.freed.wait(), 20)


async def test_one_line_is_logged_per_request(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """The line has id, key, route, status, decision and counts, and nothing of the text."""
    caplog.set_level(logging.INFO, logger="proxy")
    await server.post(CHAT, chat("TOPSECRET"), **{"X-Request-Id": "trace-1"})
    await server.get("/health")
    lines = [record.getMessage() for record in caplog.records if record.name == "proxy.middleware"]
    assert len(lines) == 1
    assert re.match(
        "request trace-1 id=[0-9a-f]{32} key=local /v1/chat/completions 200 stop "
        "decision=full reason=no_candidates reused=0 recomputed=15 completion=9 ",
        lines[0],
    )
    assert "SECRET" not in caplog.text
