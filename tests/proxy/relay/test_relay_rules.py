"""Rules in front of vLLM: what it gets, and that nothing else of a body changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvshare.requests import Decision
from tests.fake_vllm import FakeVllm
from tests.proxy.relay.relay_server import FORM, Relay, running_relay

CHAT = "/v1/chat/completions"
RULES = [
    {"name": "nonce", "match": "cch=[0-9a-f]+", "in": ["system"], "action": "pin", "value": "cch=0"},
    {"name": "clock", "match": r"^Current time: .{1,40}$", "action": "move"},
]


def chat(nonce: int, **extra: object) -> dict[str, Any]:
    """A harness's request: a nonce and a clock in front of what is always the same."""
    system = f"x-billing: cch={nonce};\nCurrent time: 12:0{nonce}\nBe good."
    messages = [{"role": "system", "content": system}, {"role": "user", "content": FORM}]
    return {"model": "tiny", "messages": messages, **extra}


async def ask(relay: Relay, body: dict[str, Any]) -> Any:
    answer = await relay.ask(body)
    assert answer.status == 200
    return answer


async def test_vllm_gets_the_prompt_behind_the_rules(vllm: FakeVllm, tmp_path: Path) -> None:
    """Tokenized and forwarded alike, so that the plan holds; nothing else of the body is another."""
    async with running_relay(tmp_path, vllm, rules=RULES) as relay:
        body = chat(1, temperature=0.5, unknown={"a": [1, None]})
        answers = [await ask(relay, body), await ask(relay, chat(2, stream=True))]
        first, second = vllm.generated
        messages = [
            {"role": "system", "content": "x-billing: cch=0;\nBe good."},
            {"role": "user", "content": f"{FORM}\nCurrent time: 12:01"},
        ]
        added = {"cache_salt", "kv_transfer_params"}
        sent = {name: member for name, member in first.body.items() if name not in added}
        assert sent == {**body, "messages": messages}
        assert second.ticket is not None
        assert second.ticket.exact_length >= len(f"<system>x-billing: cch=0;\nBe good.<user>{FORM}")
        assert relay.counts.executions[Decision.FULL, Decision.FULL, None] == 1
        for answer in answers:
            assert answer.headers["X-KVShare-Rules"] == "nonce,clock"
            found = await relay.send(f"/admin/requests/{answer.headers['X-KVShare-Request']}", method="GET")
            assert (await found.json())["rules"] == ["nonce", "clock"]


@pytest.mark.parametrize(
    "extra", [{"kvshare": {"rules": False}}, {"messages": [{"role": "user", "content": FORM}]}]
)
async def test_where_no_rule_acts_vllm_gets_the_very_bytes(
    vllm: FakeVllm, tmp_path: Path, extra: dict[str, Any]
) -> None:
    """As the client wrote them, spaces and escapes included."""
    async with running_relay(tmp_path, vllm, rules=RULES) as relay:
        raw = json.dumps(chat(1, **extra), indent=3).encode().replace(b"Be good", b"Be g\\u006fod")
        answer = await relay.send(CHAT, raw)
        assert "X-KVShare-Rules" not in answer.headers
        (seen,) = vllm.generated
        if "kvshare" in extra:  # it is the proxy's own, and not sent on
            assert "cch=1;" in seen.body["messages"][0]["content"]
        else:
            assert seen.raw.startswith(raw.rpartition(b"}")[0])


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (
            "/v1/messages",
            {"system": "cch=1\nCurrent time: 9", "messages": [{"role": "user", "content": "u"}]},
            {"system": "cch=0", "messages": [{"role": "user", "content": "u\nCurrent time: 9"}]},
        ),
        (
            "/v1/responses",
            {"instructions": "cch=1\nCurrent time: 9", "input": "u"},
            {"instructions": "cch=0", "input": "u\nCurrent time: 9"},
        ),
        ("/v1/embeddings", {"input": "cch=1"}, {"input": "cch=1"}),
    ],
)
async def test_other_apis_in_front_of_vllm_obey_too(
    vllm: FakeVllm, tmp_path: Path, path: str, body: dict[str, Any], expected: dict[str, Any]
) -> None:
    async with running_relay(tmp_path, vllm, rules=RULES) as relay:
        answer = await relay.send(path, body)
        seen = next(seen.body for seen in vllm.seen if seen.path == path)
        assert {name: seen[name] for name in expected} == expected
        assert answer.headers.get("X-KVShare-Rules") == ("nonce,clock" if body != expected else None)
