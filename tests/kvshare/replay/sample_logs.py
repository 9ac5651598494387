"""Logs to replay, of the samples in the package: workloads, and chats as in WildChat and ShareGPT."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvshare.logs.requests import Message
from kvshare.replay.workloads import generate, write_rows
from kvshare.replay.workloads.chats import reworded
from tests.kvshare.logs.logs import write_lines

_QUESTIONS = 3  # of a conversation; the reader makes a request of each


def write(name: str, folder: Path, *, num_requests: int, sources: Sequence[Path] = ()) -> Path:
    """A log of at least so many requests: "wildchat", "sharegpt", or a workload made from `sources`."""
    path = folder / f"{name}.jsonl"
    if name in ("wildchat", "sharegpt"):
        return (wildchat if name == "wildchat" else sharegpt)(path, num_requests=num_requests)
    write_rows(generate(name, sources, num_requests=num_requests, seed=1), path)
    return path


def wildchat(path: Path, *, num_requests: int) -> Path:
    """Conversations that users come back to with other words; `conversation`, a dictionary per message."""
    return write_lines(
        path,
        [
            {
                "conversation_hash": f"{number:08x}",
                "timestamp": f"2023-04-09T{number // 60 % 24:02}:{number % 60:02}:00+00:00",
                "conversation": [{**message, "hashed_ip": f"u{number % 7}"} for message in messages],
                "language": "English",
            }
            for number, messages in enumerate(_conversations("resubmit", num_requests))
        ],
    )


def sharegpt(path: Path, *, num_requests: int) -> Path:
    """Slices of long chats, `conversations` with `from` and `value`."""
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    return write_lines(
        path,
        [
            {
                "id": f"chat_{number}",
                "conversations": [
                    {"from": names[message["role"]], "value": message["content"]} for message in messages
                ],
            }
            for number, messages in enumerate(_conversations("window", num_requests))
        ],
    )


def _conversations(workload: str, num_requests: int) -> Iterator[list[dict[str, Any]]]:
    """Each a beginning of a request's chat, some of it in other words."""
    draw = random.Random(f"log:{workload}")
    for row in generate(workload, num_requests=num_requests, seed=2):
        messages = row.messages[: 2 * _QUESTIONS]
        yield [_changed(message, draw) for message in messages]


def _changed(message: Message, draw: random.Random) -> dict[str, Any]:
    content = message["content"]
    if message["role"] == "user" and draw.random() < 0.3:
        content = reworded(content, draw)
    return {"role": message["role"], "content": content}
