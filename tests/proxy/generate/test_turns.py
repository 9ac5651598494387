"""Turns become messages that templates read."""

from __future__ import annotations

import pytest

from kvshare.errors import RequestError
from proxy.generate.body_parts import MessageTurns


def test_neighbours_of_one_role_are_one_message() -> None:
    """Texts are joined by a line end, empty ones leave no trace; calls join the assistant's text."""
    turns = MessageTurns()
    for role, text in [("user", "a"), ("user", ""), ("user", "b"), ("assistant", "c")]:
        turns.add_text(role, text)
    turns.call("1", "time", {"zone": "UTC"})
    turns.result("1", "noon", param="x")
    turns.add_text("assistant", "d")
    user, assistant, tool, last = turns.messages
    assert user == {"role": "user", "content": "a\nb"}
    assert assistant["content"] == "c"
    assert assistant["tool_calls"][0]["function"] == {"name": "time", "arguments": {"zone": "UTC"}}
    assert tool == {"role": "tool", "tool_call_id": "1", "name": "time", "content": "noon"}
    assert last == {"role": "assistant", "content": "d"}


def test_a_result_needs_its_call() -> None:
    """The error has the field that the caller names."""
    with pytest.raises(RequestError) as caught:
        MessageTurns().result("1", "noon", param="input[3].call_id")
    assert caught.value.param == "input[3].call_id"


def test_incomplete_turns() -> None:
    """Nothing to answer, and a call without its result, are the client's errors."""
    turns = MessageTurns()
    with pytest.raises(RequestError):
        turns.check_complete(param="input")
    turns.add_text("user", "a")
    turns.check_complete(param="input")
    turns.call("1", "time", {})
    with pytest.raises(RequestError):
        turns.check_complete(param="input")
