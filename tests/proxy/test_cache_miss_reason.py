"""An answer says why not more was shared, and what to do; the operator sees where the prefix broke."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvshare.demo import MODEL_PATH
from kvshare.reasons import Reason, explanations
from tests.proxy.conftest import Server, chat, running_server
from tests.proxy.embedded_server import running_embedded

CHAT = "/v1/chat/completions"
LONG = "All that follows is the same for everybody who asks. " * 6


def miss(reason: str) -> dict[str, str]:
    return {"type": reason, "message": explanations()[Reason(reason)]}


async def usage_of(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    document: dict[str, Any] = await (await server.post(CHAT, body)).json()
    shared: dict[str, Any] = document["usage"]["kvshare"]
    return shared


async def test_usage_says_why_and_how_much_was_missed(server: Server) -> None:
    """Null where nothing was refused. Tokens that were computed count, whatever the reason."""
    first = await usage_of(server, chat("one text"))
    assert first["cache_miss_reason"] == miss("no_candidates")
    assert first["cache_missed_input_tokens"] == len("<user>one text")
    second = await usage_of(server, chat("one text", kvshare={"mode": "exact"}))
    assert second["cache_miss_reason"] is None
    assert second["cache_missed_input_tokens"] == 1


async def test_the_usage_of_streams_and_of_completions_says_the_same(server: Server) -> None:
    body = chat("one text", stream=True, stream_options={"include_usage": True})
    streamed = await (await server.post(CHAT, body)).text()
    *_, last, _ = (line.removeprefix("data: ") for line in streamed.split("\n\n") if line)
    assert json.loads(last)["usage"]["kvshare"]["cache_miss_reason"] == miss("no_candidates")
    answer = await server.post("/v1/completions", {"model": "echo", "prompt": ["aa", "bbb"]})
    shared = (await answer.json())["usage"]["kvshare"]
    assert shared["cache_miss_reason"] == miss("no_candidates")
    assert shared["cache_missed_input_tokens"] == 5


async def test_the_history_has_it_too() -> None:
    async with running_server() as server:
        answer = await server.post(CHAT, chat("one text"))
        document = await (await server.get(f"/admin/requests/{answer.headers['X-KVShare-Request']}")).json()
        assert document["cache_miss_reason"] == miss("no_candidates")
        assert document["cache_missed_input_tokens"] == len("<user>one text")


@pytest.mark.skipif(not MODEL_PATH.exists(), reason="the demo model has not been built")
async def test_the_operator_sees_where_the_prefix_broke_and_a_rule_mends_it() -> None:
    """The real engine: a nonce at the top costs all of the prefix, a pinned one nothing."""
    rule = {"name": "nonce", "match": "cch=[0-9a-f]+", "action": "pin", "value": "cch=0"}

    def turn(nonce: str) -> tuple[tuple[str, str], ...]:
        return ("system", f"x: cch={nonce}; {LONG}"), ("user", "Go on.")

    async with running_embedded(rules=[rule], sharing__mode="exact") as server:
        first = await server.history(await server.chat(*turn("12ab"), kvshare={"rules": False}))
        assert first["prompts"][0]["first_difference"] == 0
        assert first["cache_miss_reason"] == miss("no_candidates")
        assert first["cache_missed_input_tokens"] == first["prompts"][0]["prompt_tokens"]
        broken = await server.history(await server.chat(*turn("34cd"), kvshare={"rules": False}))
        assert broken["cache_miss_reason"] == miss("exact_only")
        pinned = [await server.history(await server.chat(*turn(nonce))) for nonce in ("56ef", "78ab")]
        (plan,) = pinned[1]["prompts"]
        assert plan["decision"] == "exact"
        assert plan["first_difference"] == plan["exact"] == plan["prompt_tokens"] - 1
        assert pinned[1]["cache_miss_reason"] is None
        assert pinned[1]["rules"] == ["nonce"]
