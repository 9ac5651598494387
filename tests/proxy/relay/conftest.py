"""A fake vLLM replica and the real proxy before it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fake_vllm import FakeVllm, running_vllm
from tests.proxy.relay.relay_server import Relay, running_relay


@pytest.fixture
async def vllm() -> AsyncIterator[FakeVllm]:
    async with running_vllm() as replica:
        yield replica


@pytest.fixture
async def relay(vllm: FakeVllm, tmp_path: Path) -> AsyncIterator[Relay]:
    async with running_relay(tmp_path, vllm) as running:
        yield running
