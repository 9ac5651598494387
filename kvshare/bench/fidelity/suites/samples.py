"""The project's own documents for scenarios: invented passages, questions over them, and conversations."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from kvshare.bench.fidelity.suites.questions import Asked, MarkedQuestion
from kvshare.replay.requests import Message
from kvshare.replay.workloads.sources import Passage


def passages() -> list[Passage]:
    """In the order of the file."""
    return [Passage(title, text) for title, text in _samples()["passages"].items()]


def marked_questions() -> list[MarkedQuestion]:
    """Each with all passages that do not support it."""
    texts = {passage.title: passage for passage in passages()}
    found = []
    for row in _samples()["questions"]:
        whole = Asked(row["question"], row["answer"], tuple(texts[title] for title in row["supporting"]))
        steps = [Asked(step["question"], step["answer"], (texts[step["passage"]],)) for step in row["steps"]]
        others = (passage for passage in texts.values() if passage not in whole.supporting)
        found.append(MarkedQuestion(whole, tuple(steps), tuple(others)))
    return found


def chats() -> list[tuple[Message, ...]]:
    """A user's message, the assistant's, and so on."""
    return [
        tuple(
            {"role": ("user", "assistant")[place % 2], "content": content}
            for place, content in enumerate(said)
        )
        for said in _samples()["chats"]
    ]


@cache
def _samples() -> Mapping[str, Any]:
    text = Path(__file__).with_name("samples.yaml").read_text(encoding="utf-8")
    samples: Mapping[str, Any] = yaml.safe_load(text)
    return samples
