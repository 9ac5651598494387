"""What the log says of a request: one line, and as JSON its fields; why it was refused, and by whose key."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from kvshare.safe_logging import JsonLines
from tests.proxy.conftest import Server, chat, key_of, running_server
from tests.proxy.fake_engine import Behaviour

CHAT = "/v1/chat/completions"
SECRET = "my diary of last year"


def logged(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The requests' lines, as they are with `logging.json`."""
    lines = [JsonLines().format(record) for record in caplog.records if record.name == "proxy.middleware"]
    return [json.loads(line) for line in lines]


@pytest.fixture(autouse=True)
def everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="proxy")


async def test_a_request_as_json(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """What the line says is there as members too, numbers as numbers."""
    await server.post(CHAT, chat(), **{"X-Request-Id": "trace-1"})
    (line,) = logged(caplog)
    expected = {
        "request_id": "trace-1",
        "key": "local",
        "endpoint": CHAT,
        "status": 200,
        "finish_reason": "stop",
        "decision": "full",
        "reason": "no_candidates",
        "reused": 0,
        "client": "127.0.0.1",
    }
    assert {name: line[name] for name in expected} == expected
    assert line["duration_ms"] >= 0
    assert "error" not in line
    assert line["message"].startswith("request trace-1 id=")


BODIES: dict[str, tuple[dict[str, Any], str, str]] = {
    "a wrong type": (chat(temperature="hot"), "temperature", "got a string"),
    "a value too high": (chat(temperature=9), "temperature", "got 9"),
    "an unsupported parameter": (chat(suffix=SECRET), "suffix", "Unsupported parameter"),
    "a role that is none": (chat(messages=[{"role": SECRET, "content": SECRET}]), "messages[0].role", "user"),
    "a word of few": (chat(reasoning_effort=SECRET), "reasoning_effort", "expected 'none'"),
    "a key that is unknown": (chat(kvshare={SECRET: 1}), "…", "expected one of mode, max_deviation"),
    "a type that is unknown": (chat(tools=[{"type": SECRET}]), "tools[0].type", "expected 'function'"),
    "a tool that is not there": (
        chat(tool_choice={"type": "function", "function": {"name": SECRET}}, tools=[]),
        "tool_choice",
        "needs 'tools'",
    ),
}


@pytest.mark.parametrize(("body", "param", "reason"), BODIES.values(), ids=BODIES)
async def test_a_400_says_which_field_is_wrong(
    server: Server, caplog: pytest.LogCaptureFixture, body: dict[str, Any], param: str, reason: str
) -> None:
    """And what was expected; what the client wrote is not repeated, not even where the answer quotes it."""
    assert (await server.post(CHAT, body)).status == 400
    (line,) = logged(caplog)
    assert (line["status"], line["param"]) == (400, param)
    assert reason in line["error_message"]
    assert f'error={line["error"]} param={param} "' in line["message"]
    assert not {SECRET, SECRET.split()[0]} & set(caplog.text.replace("'", " ").split())
    assert SECRET not in caplog.text


@pytest.mark.parametrize(("path", "kind"), [("/v1/messages", "type"), ("/v1/responses", "type")])
async def test_the_types_of_other_apis_are_not_repeated(
    server: Server, caplog: pytest.LogCaptureFixture, path: str, kind: str
) -> None:
    """The Messages and the Responses API name the type that they do not know; the log does not."""
    turn = {"role": "user", "content": [{"type": SECRET}]}
    body = {"model": "echo", "max_tokens": 1, "messages": [turn], "input": [{**turn, "type": "message"}]}
    answer = await server.post(path, body)
    assert answer.status == 400
    assert SECRET in await answer.text()
    (line,) = logged(caplog)
    assert line["param"].endswith("content[0]")
    assert "expected type" in line["error_message"]
    assert SECRET not in caplog.text


async def test_a_line_is_one_line(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """A client cannot write lines of its own into the log."""
    assert (await server.post(CHAT, {**chat(), "model": "a\nb"})).status == 404
    (line,) = logged(caplog)
    assert line["error"] == "model_not_found"
    assert "\n" not in line["message"]


async def test_the_name_of_a_key_that_may_not(guarded: Server, caplog: pytest.LogCaptureFixture) -> None:
    """A key without the role is named, an unknown one is not, and no key is ever in the log."""
    await guarded.get("/admin/stats", Authorization=f"Bearer {key_of('alice')}")
    await guarded.post(CHAT, chat(), Authorization="Bearer sk-guessed")
    await guarded.post(CHAT, {}, Authorization=f"Bearer {key_of('bob')}")
    found = [(line["key"], line["status"], line["error"]) for line in logged(caplog)]
    assert found == [
        ("alice", 403, "permission_denied"),
        ("-", 401, "invalid_api_key"),
        ("bob", 400, "invalid_request_error"),
    ]
    assert "sk-" not in caplog.text


async def test_a_key_that_is_not_asked_for_is_named(
    guarded: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """Unknown routes and wrong methods: who has a known key can be told where to go instead."""
    for key in ("", f"Bearer {key_of('alice')}", "Bearer sk-guessed"):
        await guarded.get("/v1/nowhere", Authorization=key)
        await guarded.get(CHAT, Authorization=key)
    found = [(line["key"], line["status"]) for line in logged(caplog)]
    assert found == [("-", 404), ("-", 405), ("alice", 404), ("alice", 405), ("-", 404), ("-", 405)]


async def test_other_refusals_say_why(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """A wrong content type, a body that is no JSON, a route and a method that are not there."""
    await server.post(CHAT, b"x=1", **{"Content-Type": "text/plain"})
    await server.post(CHAT, b"{")
    await server.get("/v1/nothing")
    await server.get(CHAT)
    found = [(line["status"], line["error"]) for line in logged(caplog)]
    assert found == [
        (415, "unsupported_media_type"),
        (400, "invalid_request_error"),
        (404, "not_found"),
        (405, "method_not_allowed"),
    ]
    assert all(line["error_message"] for line in logged(caplog))


async def test_a_full_queue_and_a_stream_that_breaks_off(caplog: pytest.LogCaptureFixture) -> None:
    """Both say what the client was told."""
    async with running_server(Behaviour(prefill_s=30, max_running=1, max_waiting=0)) as server:
        asking = asyncio.create_task(server.post(CHAT, chat()))
        await server.engine.running.wait()
        assert (await server.post(CHAT, chat())).status == 429
        asking.cancel()
    async with running_server(Behaviour(fail_after_tokens=1)) as server:
        await server.post(CHAT, chat(stream=True))
    errors = [line.get("error") for line in logged(caplog)]
    assert "queue_full" in errors
    assert errors[-1] == "engine_error"


async def test_bytes_that_are_no_request(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """They are logged as a 400 of nobody's, with the fault that they have, without the bytes."""
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"SECRET\r\n\r\n")
    assert b"400" in await reader.readline()
    writer.close()
    (line,) = logged(caplog)
    fault = "This is not an HTTP request: it does not begin with a method of HTTP in capital letters."
    assert line["message"] == f'request - key=- client=127.0.0.1 400 "{fault}"'
    assert line["error_message"] == fault
    assert (line["key"], line["status"], line["client"]) == ("-", 400, "127.0.0.1")
