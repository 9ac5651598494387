"""Small files in the published formats, made by hand: one good row of each, and how to write them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvshare.logs import LoggedRow, ReadReport, read_file
from kvshare.logs.requests import LoggedRequest

WILDCHAT: dict[str, Any] = {
    "conversation_hash": "4a1f",
    "model": "gpt-4-0314",
    "timestamp": "2023-04-09T00:05:00+00:00",
    "conversation": [
        {
            "content": "Hello there",
            "country": "Latvia",
            "hashed_ip": "ab12",
            "header": {"accept-language": "lv", "user-agent": "Mozilla/5.0"},
            "language": "English",
            "redacted": False,
            "role": "user",
            "state": "Riga",
            "timestamp": None,
            "toxic": False,
            "turn_identifier": 101002,
        },
        {"content": "Hi.", "role": "assistant", "timestamp": "2023-04-09T00:02:00+00:00", "hashed_ip": None},
        {"content": "And now?", "role": "user", "timestamp": None, "hashed_ip": "ab12"},
        {"content": "Now nothing.", "role": "assistant", "timestamp": None, "hashed_ip": None},
    ],
    "turn": 2,
    "language": "English",
    "openai_moderation": [{"flagged": False}],
    "toxic": False,
    "redacted": False,
    "hashed_ip": "ab12",
}
OLDER_WILDCHAT: dict[str, Any] = {
    "conversation_id": "33f0",
    "model": "gpt-4",
    "timestamp": "2023-04-09T00:05:00+00:00",
    "conversation": [
        {"content": "Hello there", "language": "English", "redacted": False, "role": "user", "toxic": False},
        {"content": "Hi.", "language": "English", "redacted": False, "role": "assistant", "toxic": False},
    ],
    "turn": 1,
    "language": "English",
    "openai_moderation": [{"flagged": False}],
    "detoxify_moderation": [{"toxicity": 0.0}],
    "toxic": False,
    "redacted": False,
}
SHAREGPT: dict[str, Any] = {
    "id": "QWJhYvA_0",
    "conversations": [
        {"from": "human", "value": "Summarise this"},
        {"from": "gpt", "value": "It is short."},
        {"from": "human", "value": "Shorter"},
    ],
}
LMSYS: dict[str, Any] = {
    "conversation_id": "33f0",
    "model": "vicuna-33b",
    "conversation": [
        {"content": "how can I bake bread", "role": "user"},
        {"content": "With flour.", "role": "assistant"},
    ],
    "turn": 1,
    "language": "English",
    "openai_moderation": [{"flagged": False}],
    "redacted": False,
}
OPENAI: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is KV?"}],
    "temperature": 0,
    "user": "u7",
    "created": 1700000000,
}
BATCH: dict[str, Any] = {
    "custom_id": "request-1",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"model": "m", "messages": [{"role": "user", "content": "What is KV?"}]},
}
MOONCAKE: dict[str, Any] = {
    "timestamp": 27482,
    "input_length": 1100,
    "output_length": 52,
    "hash_ids": [46, 47, 2366],
}
AZURE: dict[str, Any] = {
    "TIMESTAMP": "2023-11-16 18:17:03.9799600",
    "ContextTokens": "4808",
    "GeneratedTokens": "10",
}
GUIDELLM: dict[str, Any] = {
    "prompt": "Explain tides",
    "prompt_tokens_count": 3,
    "output_tokens_count": 128,
}
AIBRIX: dict[str, Any] = {
    "timestamp": 1500,
    "requests": [
        {"prompt": "One", "prompt_length": 1, "output_length": 8, "session_id": 0},
        {"prompt": "Two", "prompt_length": 1, "output_length": None},
    ],
}
CONVERSATION: dict[str, Any] = {
    "id": "a_0",
    "lang": "en",
    "messages": [
        {"role": "assistant", "content": "Where were we?"},
        {"role": "user", "content": "At the end"},
        {"role": "assistant", "content": "Then goodbye."},
    ],
}
PLAIN: dict[str, Any] = {"prompt": "Once upon a time"}
EXAMPLES: dict[str, dict[str, Any]] = {
    "wildchat": WILDCHAT,
    "sharegpt": SHAREGPT,
    "lmsys": LMSYS,
    "openai": OPENAI,
    "mooncake": MOONCAKE,
    "prompts": GUIDELLM,
    "conversations": CONVERSATION,
    "plain": PLAIN,
}
"""By format."""


def write_lines(path: Path, rows: Sequence[Any]) -> Path:
    """JSON lines; a string or bytes go in as they are."""
    with path.open("wb") as file:
        for row in rows:
            data = row if isinstance(row, bytes) else row if isinstance(row, str) else json.dumps(row)
            file.write((data if isinstance(data, bytes) else data.encode()) + b"\n")
    return path


def rows_of(path: Path, format_name: str | None = None) -> tuple[list[LoggedRow], ReadReport]:
    report = ReadReport()
    return list(read_file(path, report, format_name=format_name)), report


def requests_of(path: Path, format_name: str | None = None) -> list[LoggedRequest]:
    return [request for row in rows_of(path, format_name)[0] for request in row]


def reasons_of(path: Path, format_name: str | None = None) -> list[tuple[int, str]]:
    return [(row.line, str(row.reason)) for row in rows_of(path, format_name)[1].examples]
