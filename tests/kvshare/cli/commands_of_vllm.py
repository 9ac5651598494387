"""What `kvshare vllm` is told, in parts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def transfer(words: list[str]) -> dict[str, Any]:
    """The connector's configuration in a command."""
    document: dict[str, Any] = json.loads(words[words.index("--kv-transfer-config") + 1])
    return document


def extra(words: list[str]) -> Mapping[str, Any]:
    """KVShare's own part of it."""
    return dict(transfer(words)["kv_connector_extra_config"]["kvshare"])
