"""The real front around an engine of echoes, open and with keys, and a fake vLLM."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.fake_vllm import FakeVllm, running_vllm
from tests.proxy.conftest import Server, key_settings, running_server


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with running_server() as running:
        yield running


@pytest.fixture
async def guarded() -> AsyncIterator[Server]:
    async with running_server(auth__keys=key_settings()) as running:
        yield running


@pytest.fixture
async def vllm() -> AsyncIterator[FakeVllm]:
    async with running_vllm() as replica:
        yield replica
