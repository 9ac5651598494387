"""In front of vLLM: why not more of a request was shared, in its header and in the history."""

from __future__ import annotations

from typing import Any

import pytest

from kvshare.reasons import Reason, explanations
from tests.fake_vllm import FakeVllm
from tests.proxy.relay.relay_server import Relay, chat_body

CHAT = "/v1/chat/completions"


def miss(reason: str) -> dict[str, str]:
    return {"type": reason, "message": explanations()[Reason(reason)]}


async def test_header_and_history_say_it(relay: Relay, vllm: FakeVllm) -> None:
    """What was planned, and what the replica made of it."""
    answer = await relay.chat("Rome")
    assert answer.headers["X-KVShare-Reason"] == "no_candidates"
    document = await history(relay, answer)
    assert document["cache_miss_reason"] == miss("no_candidates")
    assert document["cache_missed_input_tokens"] == vllm.tickets[0].num_tokens
    assert document["executed"]["cache_miss_reason"] is None
    again = await history(relay, await relay.chat("Oslo"))
    assert again["cache_miss_reason"] is None
    assert again["prompts"][0]["first_difference"] == len("<user>Report of ")
    assert 0 < again["cache_missed_input_tokens"] < vllm.tickets[1].num_tokens


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (chat_body("Rome", kvshare={"mode": "off"}), "off"),
        (chat_body("Rome", model="other"), "adapter"),
        (chat_body("Rome", use_beam_search=True), "beam_search"),
        ({"model": "tiny", "messages": []}, "short_prompt"),
    ],
)
async def test_what_is_not_planned_says_why(
    relay: Relay,
    body: dict[str, object],
    reason: str,
) -> None:
    """Without a count where nothing was tokenized."""
    answer = await relay.send(CHAT, body)
    assert answer.headers["X-KVShare-Reason"] == reason
    document = await history(relay, answer)
    assert document["cache_miss_reason"] == miss(reason)
    assert (document["cache_missed_input_tokens"] is None) == (document["prompts"] == [])


@pytest.mark.parametrize(
    ("asked", "limit", "reason"),
    [(0.0, 0.0, "deviates_too_much"), (9.0, 0.05, None), (None, 0.05, None)],
)
async def test_a_request_may_lower_its_limit_of_deviation(
    relay: Relay, vllm: FakeVllm, asked: float | None, limit: float, reason: str | None
) -> None:
    """What would deviate by more is computed, and the history has the limit that decided."""
    await relay.chat("Rome")
    answer = await relay.chat("Oslo", kvshare={"max_deviation": asked})
    assert vllm.tickets[-1].is_exact == (reason is not None)
    assert "kvshare" not in vllm.generated[-1].body
    assert answer.headers.get("X-KVShare-Reason") == reason
    document = await history(relay, answer)
    assert document["cache_miss_reason"] == (reason and miss(reason))
    assert document["prompts"][0]["prediction"]["limit"] == limit
    body = chat_body("Bonn", kvshare={"max_deviation": asked})
    explained = await (await relay.send("/admin/explain", body)).json()
    assert explained["prediction"]["limit"] == limit


async def history(server: Relay, answer: Any) -> dict[str, Any]:
    found = await server.send(f"/admin/requests/{answer.headers['X-KVShare-Request']}", method="GET")
    document: dict[str, Any] = await found.json()
    return document
