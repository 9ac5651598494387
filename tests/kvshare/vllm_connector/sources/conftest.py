"""Tests of what KVShare uses of vLLM run on the sources of two versions."""

from __future__ import annotations

import pytest

from tests.kvshare.vllm_connector.sources.versions import sources_of
from tests.kvshare.vllm_connector.sources.vllm_sources import Sources


@pytest.fixture(params=["installed", "other"])
def sources(request: pytest.FixtureRequest) -> Sources:
    """The vLLM that is installed, and the one whose sources were fetched."""
    return sources_of(request.param)
