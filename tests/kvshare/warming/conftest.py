"""The real front around an engine of echoes, open and with keys, and a fake vLLM."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.fake_vllm import FakeVllm, running_vllm
from tests.proxy.conftest import guarded, server

__all__ = ["guarded", "server", "vllm"]


@pytest.fixture
async def vllm() -> AsyncIterator[FakeVllm]:
    async with running_vllm() as replica:
        yield replica
