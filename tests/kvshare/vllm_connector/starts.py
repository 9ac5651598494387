"""
Which vLLM a test starts, as a mark, and the order of tests in which each is started once.

A start takes longer than most tests. What several files start is named here: what they differ in otherwise,
such as the size of the store, does not matter to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent
TOKEN_BYTES = 1536  # of the usual model's KV, over all ranks
LITTLE_ROOM = 3000 * TOKEN_BYTES
STEP_TOKENS = 32


def starts(name: str = "llama", /, **options: Any) -> pytest.MarkDecorator:
    return pytest.mark.starts(name, **options)


USUAL = starts()
ASYNC = starts(async_scheduling=True)
QWEN3 = starts("qwen3")
IN_CHUNKS = starts(max_num_batched_tokens=128, enable_chunked_prefill=True, max_bytes=24_000 * TOKEN_BYTES)
IN_SMALL_STEPS = starts(
    kv_transfer_config={
        "kv_connector_extra_config": {
            "kvshare": {"control_port": 0, "max_bytes": 1 << 28, "step_tokens": STEP_TOKENS}
        }
    }
)
OF_SMALL_BLOCKS = starts(block_size=32, disable_log_stats=False)
WITH_LITTLE_ROOM = starts(max_bytes=LITTLE_ROOM)
IN_BFLOAT16 = starts("qwen3", dtype="bfloat16")


def beside_their_likes(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Tests that start the same vLLM stand where the first of them does; all others keep their order."""
    places: dict[str, int] = {}
    numbered = [
        (number if (started := started_by(item)) is None else places.setdefault(started, number), item)
        for number, item in enumerate(items)
    ]
    return [item for _, item in sorted(numbered, key=lambda each: each[0])]


def started_by(item: pytest.Item) -> str | None:
    """The vLLM of a test's mark, else the usual one of the fixture `vllm`; None if its file has its own."""
    if not isinstance(item, pytest.Function) or FOLDER not in item.path.parents:
        return None
    mark = item.get_closest_marker("starts")
    if mark is None:
        if "vllm" not in item.fixturenames or hasattr(item.module, "vllm") or hasattr(item.cls, "vllm"):
            return None
        mark = USUAL.mark
    mode = item.callspec.params.get("mode") if hasattr(item, "callspec") else None
    options = {"enforce_eager": mode == "eager", **mark.kwargs}
    return repr((mode, mark.args, sorted(options.items())))
