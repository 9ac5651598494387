"""Replays against a small engine, and the documents that they write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.kvshare.replay.tiny_engine import KEY, TinyEngine

FORM = " ".join(f"fact{number} about thing{number}" for number in range(40))


def live_command(engine: TinyEngine, *arguments: object) -> tuple[object, ...]:
    return (
        "replay",
        "log.jsonl",
        "--tokenizer",
        "demo",
        "--engine",
        engine.url,
        "--key",
        KEY,
        "--out",
        "live",
        *arguments,
    )


def document_at(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document
