"""The texts of a body, its end, and a body with another text: for each API."""

from __future__ import annotations

from typing import Any

import pytest

from kvshare.rules.texts import End, end_of, shape_of, texts_of, with_text

CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "developer", "content": [{"type": "text", "text": "d"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {}}, {"type": "text", "text": "u"}]},
        {"role": "assistant", "content": "a", "tool_calls": [{"function": {"arguments": "secret"}}]},
        {"role": "tool", "content": "t"},
    ],
}
MESSAGES: dict[str, Any] = {
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": [{"type": "tool_use", "input": {"text": "a"}}]},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "v"},
                {"type": "tool_result", "content": "t"},
                {"type": "tool_result", "content": [{"type": "text", "text": "w"}]},
            ],
        },
    ],
}
RESPONSES: dict[str, Any] = {
    "instructions": "s",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "u"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        {"type": "function_call", "arguments": "a"},
        {"type": "function_call_output", "output": "t"},
    ],
}


def found(path: str, body: dict[str, Any]) -> list[tuple[str, str]]:
    shape = shape_of(path)
    assert shape is not None
    return [(text.role, text.text) for text in texts_of(body, shape)]


@pytest.mark.parametrize(
    ("path", "body", "texts"),
    [
        ("/v1/chat/completions", CHAT, "system s, system d, user u, tool t"),
        ("/v1/messages", MESSAGES, "system s, user u, user v, tool t, tool w"),
        ("/v1/messages/count_tokens", {"system": "s", "messages": []}, "system s"),
        ("/v1/responses", RESPONSES, "system s, user u, tool t"),
        ("/v1/responses", {"instructions": "s", "input": "u"}, "system s, user u"),
        ("/v1/completions", {"prompt": "u"}, "user u"),
        ("/v1/completions", {"prompt": ["u", "v"]}, "user u, user v"),
        ("/v1/completions", {"prompt": [1, 2]}, ""),
    ],
)
def test_every_text_is_found_with_its_role(path: str, body: dict[str, Any], texts: str) -> None:
    """What the model said and the arguments of calls are not among them."""
    assert ", ".join(f"{role} {text}" for role, text in found(path, body)) == texts


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/chat", "/v1/completionsx", "/admin/evict", "/"])
def test_other_routes_take_no_prompt(path: str) -> None:
    assert shape_of(path) is None


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": "text", "prompt": {}, "system": 3},
        {"messages": {"role": "user"}},
        {"messages": [None, 3, [], {}, {"role": []}, {"role": "user"}, {"role": "user", "content": 3}]},
        {"messages": [{"role": "user", "content": [None, {"type": "text"}, {"type": "text", "text": 3}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
    ],
)
def test_what_is_malformed_is_left_to_its_route(body: dict[str, Any]) -> None:
    """Whatever a body is, nothing is raised."""
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"):
        shape = shape_of(path)
        assert shape is not None
        end_of(body, shape)
        assert [text.text for text in texts_of(body, shape)] in ([], ["text"])


@pytest.mark.parametrize(
    ("path", "body", "end"),
    [
        ("/v1/chat/completions", CHAT, End(("messages", 4, "content"))),
        ("/v1/messages", MESSAGES, End(("messages", 2, "content", 3, "text"), "text")),
        ("/v1/responses", RESPONSES, End(("input", 3, "output"))),
        ("/v1/responses", {"input": "u"}, End(("input",))),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": []}]},
            End(("input", 0, "content", 0, "text"), "input_text"),
        ),
        (
            "/v1/chat/completions",
            {"messages": CHAT["messages"][:4]},
            End(("messages", 2, "content", 1, "text")),
        ),
        ("/v1/chat/completions", {"messages": CHAT["messages"][:1]}, None),
        ("/v1/completions", {"prompt": "u"}, None),
    ],
)
def test_the_end_is_where_a_user_or_a_tool_said_the_last_word(
    path: str, body: dict[str, Any], end: End | None
) -> None:
    """In front of the answer that the model is to give, or has begun; a new part behind anything but text."""
    shape = shape_of(path)
    assert shape is not None
    assert end_of(body, shape) == end


def test_another_text_copies_only_the_way_to_it() -> None:
    """The body that was given stays as it is, and the rest of the new one is the same objects."""
    path = ("messages", 2, "content", 1, "text")
    changed = with_text(CHAT, path, "new")
    assert changed["messages"][2]["content"][1] == {"type": "text", "text": "new"}
    assert CHAT["messages"][2]["content"][1]["text"] == "u"
    assert changed["messages"][4] is CHAT["messages"][4]
    assert changed["messages"][2]["content"][0] is CHAT["messages"][2]["content"][0]


def test_a_new_part_is_added_behind_the_others() -> None:
    changed = with_text(MESSAGES, ("messages", 2, "content", 3, "text"), "new", new_part="text")
    assert changed["messages"][2]["content"][3:] == [{"type": "text", "text": "new"}]
    assert len(MESSAGES["messages"][2]["content"]) == 3
