"""What the settings of a server in front of vLLMs may not say."""

import pytest

from kvshare.errors import ConfigError
from kvshare.fleet.engine import VllmEngine
from kvshare.settings import load_settings


def test_a_shared_store_is_not_ignored() -> None:
    """It is each vLLM's: the error says how to give it to them, and shows no address."""
    given = {
        "vllm.replicas": [{"url": "http://127.0.0.1:9"}],
        "shared_tier.url": "redis://store.example:6379/0",
    }
    with pytest.raises(ConfigError, match="kvshare vllm MODEL --shared-tier URL") as raised:
        VllmEngine(load_settings(overrides=given))
    assert raised.value.key_path == "shared_tier.url"
    assert "store.example" not in str(raised.value)
