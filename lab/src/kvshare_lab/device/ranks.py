"""
Ranks of tensor parallelism, of which one is simulated: the others have as many heads and as much memory, and
do the same at the same time. What they say in a step comes from before its forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from kvshare.vllm_connector.worker import ranks


class _Sent:
    """The handle of an all-reduce of equal values."""

    def wait(self) -> None:
        """The others have sent the same."""


@contextmanager
def alike_ranks(count: int) -> Iterator[None]:
    """The worker is the first of so many ranks."""

    def all_reduce(*_: Any, **__: Any) -> _Sent:
        return _Sent()

    def summed(values: torch.Tensor) -> torch.Tensor:
        return values * count

    group = SimpleNamespace(world_size=count, rank_in_group=0, cpu_group=None, all_reduce=summed)
    with (
        patch.object(ranks, "get_tp_group", lambda: group),
        patch.object(torch.distributed, "all_reduce", all_reduce),
    ):
        yield
