"""The part of vLLM's scheduler that gives blocks to requests and takes them back, and looks into them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis.stateful import RuleBasedStateMachine

from delta_tree import SegmentId, Span
from tests.kvshare.vllm_connector.worker.small_worker import BLOCK_SIZE, NUM_TOKENS, write_rows

if TYPE_CHECKING:
    import torch


class BlocksOfRequests(RuleBasedStateMachine):
    """State machines over the real worker set what is declared here."""

    cache: Any
    copies: Any
    free: list[int]
    blocks: dict[str, tuple[int, ...]]  # of requests that hold some
    num_computed: dict[str, int]  # of each load's rows
    content: dict[str, float]  # by request that has been computed: the value of its rows
    loading: dict[str, tuple[SegmentId, bool]]  # and whether it was cancelled
    announced: set[str]  # loads that vLLM counts as arrived: they join a step

    def rows(self, block_ids: tuple[int, ...]) -> torch.Tensor:
        """K of all layers, (L, T, H D)."""
        import torch

        planes = [rows.flatten(2) for rows in self.cache.read(block_ids, Span(0, NUM_TOKENS)).planes]
        keys, values = (torch.cat(own) for own in (planes[: len(planes) // 2], planes[len(planes) // 2 :]))
        assert (keys == -values).all()
        return keys

    def give_blocks(self) -> tuple[int, ...]:
        given, self.free = self.free[:3], self.free[3:]
        return tuple(given)

    def take_blocks(self, name: str) -> None:
        """Whoever has them next writes at once."""
        import torch

        own = self.blocks.pop(name)
        for block in own:
            slots = torch.arange(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE)
            write_rows(self.cache, torch.full((BLOCK_SIZE,), -9.0), slots)
        self.free += own

    def check_joined(self, name: str, rows: torch.Tensor, *, failed: bool) -> None:
        """One that failed is computed whole."""
        self.announced.discard(name)
        assert failed == (name in self.copies.failed)
        if failed:
            self.num_computed[name] = NUM_TOKENS
        self.check_rows(name, rows)
        del self.loading[name]
        self.take_blocks(name)

    def check_rows(self, name: str, rows: torch.Tensor) -> None:
        own = list(enumerate(rows.transpose(0, 1)))
        num_computed = sum(bool((row == position + 0.5).all()) for position, row in own)
        num_written = sum(bool((row == self.content[name]).all()) for _, row in own)
        assert num_computed == self.num_computed[name] == NUM_TOKENS - num_written

    def check_loaded(self, name: str, *, failed: bool) -> None:
        _, is_cancelled = self.loading.pop(name)
        assert failed == (name in self.copies.failed)
        if not failed and not is_cancelled:
            self.check_rows(name, self.rows(self.blocks[name]))
        self.take_blocks(name)
