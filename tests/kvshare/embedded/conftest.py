"""An embedded engine with a tiny model, on a store of its own."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvshare.embedded.engine import EmbeddedEngine
from tests.kvshare.embedded.tiny_engine import engine_at


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[EmbeddedEngine]:
    engine = engine_at(tmp_path)
    await engine.start()
    yield engine
    await engine.stop()
