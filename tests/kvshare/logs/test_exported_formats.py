"""What gateways and observers export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.kvshare.logs import logs

QUESTION = [{"role": "user", "content": "Q"}]
ANSWERED = {"choices": [{"message": {"role": "assistant", "content": "A"}}]}
SPENT: dict[str, Any] = {
    "request_id": "chatcmpl-1",
    "call_type": "acompletion",
    "startTime": "2024-05-01T10:00:00.000Z",
}
SPENT |= {"model": "m", "end_user": "", "user": "u", "session_id": "s", "api_key": "88dc", "spend": 0.1}
EXPORTED: dict[str, dict[str, Any]] = {
    "JSON text": {"messages": json.dumps(QUESTION), "answer": "A"},
    "JSON texts": {"messages": json.dumps(QUESTION), "response": json.dumps(ANSWERED)},
    "batch line": {
        "custom_id": "1",
        "body": json.dumps({"messages": QUESTION}),
        "response": {"body": ANSWERED},
    },
    "LiteLLM": {**SPENT, "messages": QUESTION, "response": ANSWERED, "proxy_server_request": {}},
    "LiteLLM by SQL": {
        **SPENT,
        "messages": json.dumps(QUESTION),
        "response": json.dumps(ANSWERED),
        "proxy_server_request": "{}",
    },
    "LiteLLM's own request": {
        **SPENT,
        "messages": "{}",
        "response": json.dumps(ANSWERED),
        "proxy_server_request": json.dumps({"model": "m", "messages": QUESTION}),
    },
    "LiteLLM's callback": {
        **SPENT,
        "messages": {},
        "response": ANSWERED,
        "proxy_server_request": {"url": "http://x", "method": "POST", "body": {"messages": QUESTION}},
    },
    "Langfuse generation": {"input": QUESTION, "output": {"role": "assistant", "content": "A"}},
    "Langfuse trace": {"input": {"messages": QUESTION}, "output": "A", "sessionId": "s", "userId": "u"},
    "Langfuse, JSON texts": {"input": json.dumps(QUESTION), "output": json.dumps({"content": "A"})},
    "Helicone": {
        "request_body": {"model": "m", "messages": QUESTION},
        "response_body": ANSWERED,
        "request_created_at": "2024-05-01T10:00:00Z",
        "request_user_id": "u",
    },
    "stored responses": {
        "model": "m",
        "input": QUESTION,
        "output": [{"type": "message", "content": [{"type": "output_text", "text": "A"}]}],
    },
}


@pytest.mark.parametrize("name", EXPORTED)
def test_what_gateways_and_observers_export_is_read(tmp_path: Path, name: str) -> None:
    """The request and its answer are found, as JSON or as JSON text; a text that is JSON stays a text."""
    row = EXPORTED[name]
    (request,) = logs.requests_of(logs.write_lines(tmp_path / "log", [row]))
    assert (request.messages, request.answer) == (tuple(QUESTION), "A")
    assert (request.user == "u") == any(
        "u" in (row.get(key) or "") for key in ("user", "userId", "request_user_id")
    )
    assert (request.time_s == 1714557600.0) == ("startTime" in row or "request_created_at" in row)


def test_a_text_that_looks_like_json_stays_a_text(tmp_path: Path) -> None:
    """Only messages and bodies are unpacked: a model may have been asked for JSON, and users send it."""
    rows: list[dict[str, Any]] = [
        {"model": "m", "messages": QUESTION, "response": '{"weather": "fine"}'},
        {"model": "m", "prompt": '[{"role": "user", "content": "Q"}]'},
        {"model": "m", "input": '["a", "b"]'},
    ]
    answered, prompted, given = logs.requests_of(logs.write_lines(tmp_path / "log", rows))
    assert answered.answer == '{"weather": "fine"}'
    assert prompted.prompt == rows[1]["prompt"]
    assert (given.messages or ())[0]["content"] == '["a", "b"]'
