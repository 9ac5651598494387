"""Where the bodies of the generating routes have their text, which only the search by meaning reads."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.relay.dialects import CHAT, COMPLETION, MESSAGES, RESPONSES, Dialect, Unplannable
from vector_index import PromptText

CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("dialect", "body", "user", "whole"),
    [
        (CHAT, {"messages": []}, "", ""),
        (
            CHAT,
            {
                "messages": [
                    {"role": "system", "content": "s"},
                    {"role": "user", "content": [{"type": "text", "text": "a"}, "b"]},
                    {"role": "assistant", "content": None, "tool_calls": [{}]},
                    {"role": "tool", "content": "t"},
                ]
            },
            "ab",
            "s\nab\nt",
        ),
        (COMPLETION, {"prompt": "p"}, "", "p"),
        (COMPLETION, {"prompt": ["p"]}, "", "p"),
        (COMPLETION, {"prompt": [1, 2]}, "", ""),
        (RESPONSES, {"input": "a"}, "a", "a"),
        (
            RESPONSES,
            {
                "instructions": "s",
                "input": [
                    {"role": "user", "content": "a"},
                    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "r"}]},
                    CALL,
                    {"type": "function_call_output", "call_id": "1", "output": "o"},
                    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "b"}]},
                ],
            },
            "b",
            "s\na\nr\no\nb",
        ),
        (
            MESSAGES,
            {
                "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
                "messages": [
                    {"role": "user", "content": "a"},
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "thinking", "thinking": "h", "signature": "x"},
                            {"type": "tool_use", "id": "1", "name": "f", "input": {"type": "image"}},
                        ],
                    },
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "content": [{"type": "text", "text": "o"}]},
                            {"type": "text", "text": "b"},
                        ],
                    },
                ],
            },
            "ob",
            "s\na\nh\nob",
        ),
    ],
)
def test_the_text_of_a_body(dialect: Dialect, body: dict[str, Any], user: str, whole: str) -> None:
    """The last user turn, and all turns behind what stands before them; calls of tools have none."""
    assert dialect.text_of(body) == PromptText(last_user_turn=user, body=whole)


@pytest.mark.parametrize(
    ("dialect", "content"),
    [
        (CHAT, [{"type": "image_url", "image_url": {"url": "u"}}]),
        (CHAT, [{"image_url": "u"}]),
        (CHAT, [{"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}]),
        (CHAT, [{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AA=="}}]),
        (MESSAGES, [{"type": "image", "source": {"type": "url", "url": "data:image/png;base64,AA=="}}]),
        (CHAT, [3]),
        (MESSAGES, [{"type": "image", "source": {}}]),
        (MESSAGES, [{"type": "tool_result", "content": [{"type": "image"}]}]),
        (MESSAGES, [{"type": ["text"]}]),
        (RESPONSES, [{"type": "input_file", "file_id": "f"}]),
    ],
)
def test_what_is_not_all_text_is_not_planned(dialect: Dialect, content: object) -> None:
    """Other images may have the same tokens."""
    turns = [{"role": "user", "content": content}]
    with pytest.raises(Unplannable, match="multimodal"):
        dialect.text_of({"input": turns} if dialect is RESPONSES else {"messages": turns})


@pytest.mark.parametrize("dialect", [CHAT, COMPLETION, RESPONSES, MESSAGES])
def test_a_body_without_a_prompt_is_malformed(dialect: Dialect) -> None:
    """vLLM will say what is missing."""
    with pytest.raises(Unplannable, match="malformed"):
        dialect.text_of({"model": "m"})
