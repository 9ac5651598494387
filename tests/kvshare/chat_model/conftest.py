"""The default chat model, prepared once per user as `kvshare serve` does."""

import os
from pathlib import Path

import pytest

from kvshare.chat_model.prepare import prepare
from kvshare.errors import ModelError


@pytest.fixture(scope="session")
def chat_model() -> Path:
    """Its folder. Skipped where it cannot be downloaded, but not in CI."""
    try:
        return prepare()
    except ModelError as exc:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"the default chat model cannot be had: {exc}")
