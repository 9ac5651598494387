"""Runs of tokens in vLLM's blocks, and whether they still lie there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from delta_tree import Span
from kvshare.vllm_connector.metadata import BlockSource

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId


@dataclass(frozen=True, slots=True, eq=False)
class BlockPlace:
    """
    Blocks of a request, each with the hash that vLLM's prefix cache gave it, or None.

    before      how many tokens of the first block come before the first token of the run
    num_tokens  of the run
    step        the rows are computed when the step with this number has ended
    """

    before: int
    block_ids: tuple[int, ...]
    hashes: tuple[BlockHashWithGroupId | None, ...]
    num_tokens: int
    step: int = 0

    @property
    def last_full(self) -> tuple[int, BlockHashWithGroupId] | None:
        """The last block that has a hash."""
        pairs = zip(reversed(self.block_ids), reversed(self.hashes), strict=True)
        return next(((block_id, known) for block_id, known in pairs if known is not None), None)

    def is_gone(self, pool: BlockPool) -> bool:
        """True if every block has other tokens now, or was not full. Such a place is never found again."""
        pairs = zip(self.block_ids, self.hashes, strict=True)
        return not any(
            known is not None and pool.blocks[block_id].block_hash is known for block_id, known in pairs
        )

    def is_part_of(self, other: BlockPlace) -> bool:
        """Return whether the other one has the same rows, and perhaps more of them."""
        return self.block_ids == other.block_ids and all(
            mine is None or mine is its for mine, its in zip(self.hashes, other.hashes, strict=True)
        )

    def source(self, span: Span, pool: BlockPool, *, block_size: int) -> BlockSource | None:
        """Return the place of these tokens of the run; None if a block of them has other tokens now."""
        first = self.before + span.start
        blocks = slice(first // block_size, -(-(self.before + span.end) // block_size))
        own, hashes = self.block_ids[blocks], self.hashes[blocks]
        # The very same object: vLLM makes one each time a block is filled. An equal one may be of rows that
        # were computed a second time, which can differ where they come from approximate KV.
        is_valid = len(own) == blocks.stop - blocks.start and all(
            known is not None and pool.blocks[block_id].block_hash is known
            for block_id, known in zip(own, hashes, strict=True)
        )
        return BlockSource(own, first % block_size) if is_valid else None


def place_in(
    pool: BlockPool, span: Span, block_ids: Sequence[int], *, block_size: int, step: int = 0
) -> BlockPlace:
    """The place of these positions of a request that has these blocks."""
    first, end = span.start // block_size, -(-span.end // block_size)
    own = tuple(block_ids[first:end])
    hashes = tuple(hash_of(pool, each, (first + n + 1) * block_size) for n, each in enumerate(own))
    return BlockPlace(span.start - first * block_size, own, hashes, len(span), step)


def hash_of(pool: BlockPool, block_id: int, num_tokens: int) -> BlockHashWithGroupId | None:
    """Return the hash of a block if it is full, its last token being number `num_tokens` of its prompt."""
    block = pool.blocks[block_id]
    return block.block_hash if block.block_hash_num_tokens == num_tokens else None
