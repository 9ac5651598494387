"""Rules on the way of a request: what the model sees, and where the rules are named."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.proxy.conftest import Server, running_server
from tests.proxy.relay.relay_server import FORM
from tests.proxy.test_metrics import scrape, value

CHAT = "/v1/chat/completions"
RULES: list[dict[str, object]] = [
    {"name": "nonce", "match": "cch=[0-9a-f]+", "in": ["system"], "action": "pin", "value": "cch=0"},
    {"name": "clock", "match": r"^Current time: .{1,40}$", "action": "move"},
]
SYSTEM = "x-billing: cch={nonce};\nCurrent time: 12:0{nonce}\nBe good."


def chat(nonce: int, text: str = FORM, **extra: object) -> dict[str, Any]:
    """A harness's request: a nonce and a clock in front of what is always the same."""
    system = {"role": "system", "content": SYSTEM.format(nonce=nonce)}
    return {"model": "echo", "messages": [system, {"role": "user", "content": text}], **extra}


def ruled(nonce: int, text: str = FORM) -> str:
    """What the fake engine's tokenizer then makes of it."""
    return f"<system>x-billing: cch=0;\nBe good.<user>{text}\nCurrent time: 12:0{nonce}"


def given_to(server: Server) -> list[str]:
    """The prompts that the engine was given."""
    return [bytes(request.prompt.token_ids.tolist()).decode() for request in server.engine.requests]


async def test_without_rules_nothing_is_rewritten_or_named(server: Server) -> None:
    """An empty list is what ships."""
    answer = await server.post(CHAT, chat(1))
    assert answer.status == 200
    assert "X-KVShare-Rules" not in answer.headers
    assert "cch=1" in given_to(server)[0]
    document = await (await server.get(f"/admin/requests/{answer.headers['X-KVShare-Request']}")).json()
    assert document["rules"] == []


async def test_the_engine_gets_the_prompt_behind_the_rules(caplog: pytest.LogCaptureFixture) -> None:
    """Streamed or not; the answer, the history, the metric and the log name what acted, and none the text."""
    caplog.set_level(logging.INFO, "proxy.middleware")
    async with running_server(rules=RULES) as server:
        answers = [await server.post(CHAT, chat(n, stream=n == 2)) for n in (1, 2)]
        assert given_to(server) == [ruled(1), ruled(2)]
        shared = len(f"<system>x-billing: cch=0;\nBe good.<user>{FORM}\nCurrent time: 12:0")
        assert answers[1].headers["X-KVShare-Plan"].startswith(f"exact={shared},")
        for answer in answers:
            assert answer.headers["X-KVShare-Rules"] == "nonce,clock"
            unique_id = answer.headers["X-KVShare-Request"]
            document = await (await server.get(f"/admin/requests/{unique_id}")).json()
            assert document["rules"] == ["nonce", "clock"]
        samples = await scrape(server)
        assert value(samples, "kvshare_rules_applied_total", rule="nonce") == 2
        assert value(samples, "kvshare_rules_applied_total", rule="clock") == 2
    said = [record.getMessage() for record in caplog.records if CHAT in record.getMessage()]
    assert len(said) == 2
    assert all(" rules=nonce,clock " in line and "12:0" not in line for line in said)


async def test_a_request_may_do_without() -> None:
    """And one whose prompt no rule concerns is not said to be rewritten."""
    async with running_server(rules=RULES) as server:
        without = await server.post(CHAT, chat(1, kvshare={"rules": False}))
        other = await server.post(CHAT, {"model": "echo", "messages": [{"role": "user", "content": "cch=1"}]})
        for answer in (without, other):
            assert answer.status == 200
            assert "X-KVShare-Rules" not in answer.headers
        assert "cch=1;" in given_to(server)[0]
        refused = await server.post(CHAT, chat(1, kvshare={"rules": "no"}))
        assert (refused.status, (await refused.json())["error"]["param"]) == (400, "kvshare.rules")


async def test_completions_and_explain_obey_too() -> None:
    everywhere = [{**RULES[0], "in": ["user"]}]
    async with running_server(rules=everywhere) as server:
        answer = await server.post("/v1/completions", {"model": "echo", "prompt": ["cch=1", "cch=2"]})
        assert answer.headers["X-KVShare-Rules"] == "nonce"
        assert given_to(server) == ["cch=0", "cch=0"]
        explained = await server.post("/admin/explain", chat(1, text="cch=12345"))
        document = await explained.json()
        assert document["rules"] == ["nonce"]
        assert document["prompt_tokens"] == len(f"<system>{SYSTEM.format(nonce=1)}<user>cch=0".encode())


async def test_a_large_body_is_rewritten_the_same() -> None:
    """Off the event loop."""
    text = "word " * 70_000
    async with running_server(rules=RULES) as server:
        server.engine.behaviour.max_model_len = 10**6
        await server.post(CHAT, chat(1, text=text, max_tokens=1))
        assert given_to(server) == [ruled(1, text)]
