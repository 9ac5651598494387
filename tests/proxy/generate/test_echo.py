"""`echo` on /v1/completions: the prompt's text in front of the answer's."""

from __future__ import annotations

from typing import Any

import pytest

from tests.proxy.conftest import Server


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [("ab", ["ab"]), ([104, 105], ["hi"]), (["ab", "cd"], ["ab", "cd"]), ([[104], [105]], ["h", "i"])],
)
async def test_choices_begin_with_their_prompt(server: Server, prompt: Any, texts: list[str]) -> None:
    """Whole and streamed, for every choice of every prompt."""
    async with server.client() as client:
        whole = await client.completions.create(model="echo", prompt=prompt, echo=True, n=2)
        stream = await client.completions.create(model="echo", prompt=prompt, echo=True, n=2, stream=True)
        streamed = [""] * len(whole.choices)
        async for chunk in stream:
            streamed[chunk.choices[0].index] += chunk.choices[0].text
    expected = [text + text for text in texts for _ in range(2)]  # the engine echoes, too
    assert [choice.text for choice in whole.choices] == streamed == expected
