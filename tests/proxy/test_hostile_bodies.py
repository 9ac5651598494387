"""
Bodies as large as the limit allows, made to keep a parser busy: each is answered, the server goes on
meanwhile and takes a bounded amount of memory. docs/security.md has the parsers.
"""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from kvshare.demo import MODEL_PATH
from kvshare.settings import load_settings
from tests.fake_vllm import running_vllm
from tests.proxy.embedded_server import running_embedded
from tests.proxy.relay.relay_server import running_relay

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MODEL = "kvshare-demo"
LIMIT = load_settings().server.max_body_bytes
RAISED = 64 * 2**20
BODY = {"model": MODEL, "max_tokens": 1}
IS_LINUX = os.uname().sysname == "Linux"


Maker = Callable[[int], tuple[str, bytes]]  # of a route and a body of at most so many bytes


def said(text: str) -> Maker:
    """A message of nothing but this, up to the limit."""

    def make(size: int) -> tuple[str, bytes]:
        escaped = json.dumps(text)[1:-1]
        repeated = (escaped * (size // len(escaped))).encode()
        head = json.dumps(BODY | {"messages": [{"role": "user", "content": "X"}]}).encode()
        return CHAT, head.replace(b"X", repeated[: (size - len(head)) // len(escaped) * len(escaped)])

    return make


def member(name: str, piece: str, closing: str = "0]", path: str = CHAT) -> Maker:
    """A list of nothing but this, up to the limit."""

    def make(size: int) -> tuple[str, bytes]:
        given = BODY | ({"prompt": "a"} if path == TEXT else {"messages": [{"role": "user", "content": "a"}]})
        head = json.dumps(given)[:-1] + f', "{name}": ['
        return path, (head + piece * ((size - len(head) - 9) // len(piece)) + closing + "}").encode()

    return make


def names(size: int) -> tuple[str, bytes]:
    """As many different names as are read."""
    members = ",".join(f'"{number:x}":1' for number in range(min(size // 9, 600_000)))
    return CHAT, (json.dumps(BODY)[:-1] + "," + members + "}").encode()


BODIES: dict[str, Maker] = {
    "one word": said("a"),
    "digits": said("1"),
    "spaces": said(" "),
    "lines": said("\n"),
    "combining marks": said("\u0301\u0316"),
    "emoji": said("👩‍👩‍👧"),
    "special tokens": said("<|im_end|>"),
    "wrong messages": member("messages", '{"role":"user","content":1},'),
    "wrong parts": member("messages", '{"role":"user","content":[{"type":"text","text":1}]},'),
    "template arguments": member("chat_template_kwargs", "[],"),
    "documents": member("documents", '{"text":"a"},'),
    "stop strings": member("stop", '"a",'),
    "token ids": member("prompt", "1,", "1]", TEXT),
    "huge token ids": member("prompt", "9" * 300 + ",", "1]", TEXT),
    "lists": member("prompt", "[],", "[]]", TEXT),
    "names": names,
    "depth": lambda size: (CHAT, b"[" * size),
    "bomb": lambda size: (CHAT, gzip.compress(bytes(size * 3), 1)),
}


@dataclass
class Watched:
    """What a body cost the others."""

    gap_s: float = (
        0.0  # of computing between two turns of the event loop: a clock would count other processes
    )


@contextmanager
def watched() -> Iterator[Watched]:
    result = Watched()

    async def tick() -> None:
        while True:
            before = time.process_time()
            await asyncio.sleep(0.01)
            result.gap_s = max(result.gap_s, time.process_time() - before)

    task = asyncio.create_task(tick())
    try:
        yield result
    finally:
        task.cancel()


async def check_all(
    url: str, http: aiohttp.ClientSession, size: int, *, max_gap_s: float, max_mib: int
) -> None:
    """Send every body; none may be the server's failure, stop the loop for long, or take much memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, make in BODIES.items():
        path, raw = make(size)
        assert len(raw) <= size, name
        coding = "gzip" if name == "bomb" else "identity"
        headers = {"Content-Type": "application/json", "Content-Encoding": coding}
        with watched() as cost:
            async with http.post(url + path, data=io.BytesIO(raw), headers=headers) as response:
                document = await response.json()
        assert response.status in (200, 400, 413), (name, document)
        assert response.status == 200 or document["error"]["message"], name
        assert cost.gap_s < max_gap_s, name
        async with http.get(f"{url}/health") as response:
            assert response.status == 200, name
    taken_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert not IS_LINUX or taken_mib < max_mib


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.skipif(not MODEL_PATH.exists(), reason="the demo model has not been built")
async def test_the_embedded_engine_at_the_default_limit() -> None:
    """What a client may send without any setting."""
    async with running_embedded() as server:
        await check_all(server.url, server.http, LIMIT, max_gap_s=4, max_mib=700)


@pytest.mark.slow
async def test_the_relay_at_the_default_limit(tmp_path: Path) -> None:
    """The same in front of vLLM."""
    async with running_vllm() as vllm, running_relay(tmp_path, vllm) as relay:
        await check_all(relay.url, relay.http, LIMIT, max_gap_s=4, max_mib=700)


@pytest.mark.model
@pytest.mark.long
@pytest.mark.skipif(not MODEL_PATH.exists(), reason="the demo model has not been built")
async def test_the_embedded_engine_at_a_raised_limit() -> None:
    """64 MiB, where the operator raised it."""
    async with running_embedded(server__max_body_bytes=RAISED) as server:
        await check_all(server.url, server.http, RAISED, max_gap_s=15, max_mib=3000)


@pytest.mark.long
async def test_the_relay_at_a_raised_limit(tmp_path: Path) -> None:
    """The same in front of vLLM."""
    async with running_vllm() as vllm, running_relay(tmp_path, vllm, server__max_body_bytes=RAISED) as relay:
        await check_all(relay.url, relay.http, RAISED, max_gap_s=15, max_mib=3000)
