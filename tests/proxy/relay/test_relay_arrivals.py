"""What the relay says of an answer that has begun: similar prompts wait for its prompt, and no longer."""

from __future__ import annotations

import asyncio

from tests.fake_vllm import FakeVllm
from tests.proxy.conftest import eventually
from tests.proxy.relay.relay_server import Relay, chat_body


async def test_an_answer_that_has_begun_is_waited_for_only_briefly(relay: Relay, vllm: FakeVllm) -> None:
    """Its first token is there, but nothing is reported of it."""
    vllm.behaviour.silent = True
    vllm.behaviour.token_s = 20.0
    first = asyncio.create_task(relay.send("/v1/chat/completions", chat_body("Rome", stream=True)))
    await eventually(lambda: bool(vllm.generated))
    await asyncio.wait_for(relay.send("/v1/chat/completions", chat_body("Paris")), 60)
    assert not first.done()
    first.cancel()
