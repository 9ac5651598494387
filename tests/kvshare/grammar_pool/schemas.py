"""Schemas that harm their compiler and one that does not, and what tests do with them."""

import asyncio
import json
from contextlib import suppress
from typing import Any

import pytest

from kvshare.demo import MODEL_PATH
from kvshare.grammar_pool.frames import Frame
from kvshare.grammar_pool.limits import COMPILE_S, MEMORY_BYTES
from kvshare.grammar_pool.matcher import RemoteMatcher
from kvshare.grammar_pool.pool import GrammarPool

CRASHES = {"type": "integer", "minimum": -(2**63), "maximum": -(2**63) + 3}
TAKES_LONG = {"type": "integer", "multipleOf": 2**31}
TAKES_MEMORY = {"type": "array", "minItems": 2**40, "items": {"enum": [1]}}
# Whichever the machine meets first.
BEYOND_A_LIMIT = rf"more than ({COMPILE_S:g} s|{MEMORY_BYTES // 2**20} MiB)"
FINE = {"enum": [1]}
TOKENIZER = (MODEL_PATH / "tokenizer.json").read_text(encoding="utf-8")
TOKEN_OF_QUOTE = json.loads(TOKENIZER)["model"]["vocab"]['"']


async def compiles(pool: GrammarPool, schema: object, *, key: str = "ann") -> None:
    matcher, mask = await pool.compiled(lark(schema), key=key, param="tools")
    matcher.close()
    assert mask


def lark(schema: object) -> dict[str, str]:
    return {"lark": f"start: json\njson: %json {json.dumps(schema)}"}


async def reply(matcher: RemoteMatcher, choice: int = 0) -> Frame:
    for _ in range(60_000):
        if (frame := matcher.poll(choice, wait_s=0.0)) is not None:
            return frame
        await asyncio.sleep(0.001)
    pytest.fail("no reply")


async def cancelled(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    with suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks, return_exceptions=True)
