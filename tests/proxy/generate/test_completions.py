"""The contract of OpenAI's completions, through the real client over a real socket."""

from __future__ import annotations

from typing import Any

import pytest

from tests.proxy.conftest import Server


async def test_completion_answers_whole_and_streamed(server: Server) -> None:
    """A text completion is the same text whole and in chunks."""
    async with server.client() as client:
        whole = await client.completions.create(model="echo", prompt="once upon")
        stream = await client.completions.create(model="echo", prompt="once upon", stream=True)
        chunks = [chunk async for chunk in stream]
    assert whole.object == "text_completion"
    assert whole.choices[0].text == "once upon"
    assert whole.choices[0].finish_reason == "stop"
    assert "".join(chunk.choices[0].text for chunk in chunks) == "once upon"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 9 + ["stop"]


async def test_completion_ends_after_sixteen_tokens_unless_told(server: Server) -> None:
    """OpenAI's default length of a text completion is 16 tokens; a chat has none."""
    async with server.client() as client:
        completion = await client.completions.create(model="echo", prompt="x" * 40)
        answer = await client.chat.completions.create(
            model="echo", messages=[{"role": "user", "content": "x" * 40}]
        )
    assert completion.choices[0].text == "x" * 16
    assert completion.choices[0].finish_reason == "length"
    assert answer.choices[0].message.content == "x" * 40


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        (["ab", "cd", "ef"], ["ab", "cd", "ef"]),
        ([104, 105], ["hi"]),
        ([[104, 105], [106]], ["hi", "j"]),
    ],
)
async def test_completion_takes_every_form_of_prompt(server: Server, prompt: Any, texts: list[str]) -> None:
    """Lists of texts and of token ids answer in order, n choices for each."""
    async with server.client() as client:
        whole = await client.completions.create(model="echo", prompt=prompt, n=2)
        stream = await client.completions.create(model="echo", prompt=prompt, n=2, stream=True)
        streamed = [""] * len(whole.choices)
        async for chunk in stream:
            streamed[chunk.choices[0].index] += chunk.choices[0].text
    expected = [text for text in texts for _ in range(2)]
    assert [choice.text for choice in whole.choices] == streamed == expected
    assert [choice.index for choice in whole.choices] == list(range(len(expected)))
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == sum(len(text) for text in texts)


async def test_more_prompts_than_slots(server: Server) -> None:
    """A list of prompts longer than the engine's slots is answered in full."""
    texts = [f"prompt {number}" for number in range(8)]
    async with server.client() as client:
        answer = await client.completions.create(model="echo", prompt=texts)
    assert [choice.text for choice in answer.choices] == texts


async def test_completion_logprobs(server: Server) -> None:
    """Tokens, logprobs, alternatives and offsets are parallel lists, running on through a stream."""
    options: dict[str, Any] = {"model": "echo", "prompt": "abc", "logprobs": 1}
    async with server.client() as client:
        whole = await client.completions.create(**options)
        stream = await client.completions.create(**options, stream=True)
        chunks = [chunk async for chunk in stream]
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.tokens == ["a", "b", "c"]
    assert logprobs.text_offset == [0, 1, 2]
    assert logprobs.top_logprobs[1] == {"a": -1.0, "b": -9999.0}
    offsets = [offset for chunk in chunks if (lp := chunk.choices[0].logprobs) for offset in lp.text_offset]
    assert offsets == [0, 1, 2]
