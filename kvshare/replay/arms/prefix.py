"""The `prefix` arm: what vLLM's prefix cache reuses."""

from __future__ import annotations

import time
from typing import Any

from delta_tree import Span
from kvshare.replay.arms.base import Arm, Workbench, stored_tokens
from kvshare.replay.arms.block_pool import BlockPool, EndlessPool, block_digests
from kvshare.replay.requests import Outcome, TokenizedRequest, any_of


class PrefixArm(Arm):
    """Whole blocks of an equal prefix, prompts and answers alike; at least the last token is computed."""

    family = "prefix"

    def __init__(
        self, name: str, bench: Workbench, capacity_tokens: int | None = None, *, block_size: int = 16
    ) -> None:
        super().__init__(name, bench, capacity_tokens)
        self.block_size = block_size
        self._pool = EndlessPool() if capacity_tokens is None else BlockPool(capacity_tokens // block_size)

    @property
    def options(self) -> dict[str, Any]:
        return {"block_size": self.block_size}

    @property
    def num_stored_bytes(self) -> int:
        return self._pool.num_cached * self.block_size * self.bench.bytes_per_token

    def observe(self, request: TokenizedRequest) -> Outcome:
        began = time.perf_counter()
        logged, size = request.logged, self.block_size
        tokens = stored_tokens(request)
        digests = block_digests(logged.namespace, tokens, size)
        owners = self._pool.find(digests[: max(0, request.num_tokens - 1) // size])
        lookup_s = time.perf_counter() - began
        num_blocks = -(-len(tokens) // size)
        self._pool.serve(digests, num_hit=len(owners), num_blocks=num_blocks, asker=logged.asker)
        num_hit = len(owners) * size
        return Outcome(
            hits=(Span(0, num_hit),) if num_hit else (),
            num_exact=num_hit,
            num_donors=1 if num_hit else 0,
            shifts=(0,) if num_hit else (),
            cross_user=any_of(map(logged.asker.is_other, owners)),
            lookup_s=lookup_s,
            num_stored_bytes=self.num_stored_bytes,
        )
