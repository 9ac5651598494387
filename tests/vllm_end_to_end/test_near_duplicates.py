"""Prompts that resemble earlier ones are answered right from those, by every route and client."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import pytest

from kvshare.replay.live import LIVE_POLICIES, LiveOptions, replay_live
from kvshare.replay.options import ReplayOptions
from kvshare.replay.policies import parse_policies
from kvshare.settings import load_settings
from tests.conftest import Server as EmbeddedServer
from tests.vllm_end_to_end.fleet import MODEL, WAIT_S, Fleet, ask, donate, pair, rested, settled


@pytest.mark.parametrize("seed", range(1, 7))
def test_a_near_duplicate_is_answered_right_from_another_prompts_kv(fleet: Fleet, seed: int) -> None:
    """Most of the second user's form is not computed, and the answer is that of his own values."""
    forms = pair(seed)
    with fleet.client("ann") as ann, fleet.client("bob") as bob:
        donate(fleet, ann, forms.donor_messages)
        answer, num_tokens, num_cached = ask(bob, forms.recipient_messages)
    assert answer == forms.answer, fleet.why()
    assert num_cached > 0.4 * num_tokens, fleet.why()


@dataclass(frozen=True)
class Reply:
    """What a client of any route sees of an answer."""

    text: str
    num_tokens: int  # of the prompt
    num_cached: int
    decision: str | None  # None: it was not to be shared


def ask_messages(fleet: Fleet, messages: list[dict[str, str]], *, stream: bool, **kvshare: Any) -> Reply:
    """By POST /v1/messages and Anthropic's client, with a tool."""
    system = "\n".join(message["content"] for message in messages if message["role"] == "system")
    tool = {"name": "look_up", "input_schema": {"type": "object", "properties": {}}}
    with anthropic.Anthropic(
        base_url=fleet.proxy.url, api_key=EmbeddedServer.key("ann"), max_retries=0, timeout=WAIT_S
    ) as client:
        body: dict[str, Any] = {
            "model": MODEL,
            "max_tokens": 12,
            "system": system,
            "messages": [message for message in messages if message["role"] != "system"],
            "tools": [tool],
            "stream": stream,
            "extra_body": {"temperature": 0, "kvshare": kvshare},
        }
        raw: Any = client.messages.with_raw_response.create(**body)  # of a message or of a stream
        if stream:
            events = [event.model_dump() for event in raw.parse()]
            text = "".join(event["delta"].get("text", "") for event in events if "delta" in event)
            (usage,) = (event["usage"] for event in events if event["type"] == "message_delta")
        else:
            text, usage = raw.parse().content[0].text, raw.parse().usage.model_dump()
    num_cached = usage["cache_read_input_tokens"] or 0
    num_tokens = usage["input_tokens"] + num_cached + (usage["cache_creation_input_tokens"] or 0)
    return Reply(text, num_tokens, num_cached, raw.headers.get("X-KVShare-Decision"))


def ask_responses(fleet: Fleet, messages: list[dict[str, str]], *, stream: bool, **kvshare: Any) -> Reply:
    """By POST /v1/responses and OpenAI's client, with a tool."""
    tool = {"type": "function", "name": "look_up", "parameters": {"type": "object", "properties": {}}}
    with fleet.client("ann") as client:
        body: dict[str, Any] = {
            "model": MODEL,
            "max_output_tokens": 12,
            "input": messages,
            "tools": [tool],
            "temperature": 0,
            "stream": stream,
            "extra_body": {"kvshare": kvshare},
        }
        raw: Any = client.responses.with_raw_response.create(**body)  # of a response or of a stream
        if stream:
            *_, last = raw.parse()
            assert last.type == "response.completed"
            response = last.response
        else:
            response = raw.parse()
    usage = response.usage
    cached = usage.input_tokens_details.cached_tokens
    return Reply(response.output_text, usage.input_tokens, cached, raw.headers.get("X-KVShare-Decision"))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("asked", "seed"), [(ask_messages, 50), (ask_responses, 60)])
def test_messages_and_responses_are_shared_like_chats(
    fleet: Fleet, asked: Callable[..., Reply], seed: int, stream: bool
) -> None:
    """Through the clients of both routes, tools in the body: copied, and answered as without sharing."""
    forms = pair(seed + stream)
    before = rested(fleet)
    asked(fleet, forms.donor_messages, stream=stream)
    settled(fleet, before)
    shared = asked(fleet, forms.recipient_messages, stream=stream)
    full = asked(fleet, forms.recipient_messages, stream=stream, mode="off")
    assert shared.text == full.text
    assert (shared.decision, full.decision) == ("approx", None)
    assert shared.num_tokens == full.num_tokens
    assert shared.num_cached > 0.3 * shared.num_tokens, fleet.why()


def test_a_log_is_replayed_through_vllm(fleet: Fleet, tmp_path: Path) -> None:
    """`kvshare replay --engine`: real times, and what vLLM says it had beside what was predicted."""
    forms = pair(31)
    log = tmp_path / "log.jsonl"
    log.write_text(
        "".join(json.dumps({"messages": m}) + "\n" for m in (forms.donor_messages, forms.recipient_messages))
    )
    options = ReplayOptions(
        paths=[log],
        out=tmp_path,
        policies=parse_policies(f"{LIVE_POLICIES},oracle"),
        settings=load_settings(),
        tokenizer="demo",
    )
    live = LiveOptions(fleet.proxy.url, key=EmbeddedServer.key("ann"), concurrency=1, max_tokens=2)
    with fleet.client("ann") as ann:
        donate(fleet, ann, forms.donor_messages)
    document = replay_live(options, live)
    assert document["errors"] == {}
    assert document["ttft_ms"]["p50"] > 0
    predicted = {arm["arm"]: arm["token_hit_rate"] for arm in document["predicted"]}
    assert predicted["oracle"] > 0.3
    assert document["reported"]["token_hit_rate"] > 0.4, fleet.why()
