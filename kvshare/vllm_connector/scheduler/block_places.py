"""Where runs of tokens lie in vLLM's blocks, and whether they still do."""

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

    before      the number of tokens in the first block before the run
    num_tokens  the length of the run
    step        the number of the step after which the rows are computed
    """

    before: int
    block_ids: tuple[int, ...]
    hashes: tuple[BlockHashWithGroupId | None, ...]
    num_tokens: int
    step: int = 0

    @property
    def last_full(self) -> tuple[int, BlockHashWithGroupId] | None:
        """Return the last block that has a hash, with the hash; None if no block has one."""
        pairs = zip(reversed(self.block_ids), reversed(self.hashes), strict=True)
        return next(((block_id, known) for block_id, known in pairs if known is not None), None)

    def is_gone(self, pool: BlockPool) -> bool:
        """Return whether no block has its hash any more. Such a place is never found again."""
        pairs = zip(self.block_ids, self.hashes, strict=True)
        return not any(
            known is not None and pool.blocks[block_id].block_hash is known for block_id, known in pairs
        )

    def is_part_of(self, other: BlockPlace) -> bool:
        """Return whether another place has the same blocks, with the same hashes and perhaps more."""
        return self.block_ids == other.block_ids and all(
            mine is None or mine is its for mine, its in zip(self.hashes, other.hashes, strict=True)
        )

    def source(self, span: Span, pool: BlockPool, *, block_size: int) -> BlockSource | None:
        """Return the place of these tokens of the run; None if a block of them has other tokens now."""
        first = self.before + span.start
        blocks = slice(first // block_size, -(-(self.before + span.end) // block_size))
        block_ids, hashes = self.block_ids[blocks], self.hashes[blocks]
        # The same object, not only an equal hash: vLLM makes one each time a block is filled. Rows with an
        # equal hash may have been computed a second time, and can differ if they come from approximate KV.
        is_valid = len(block_ids) == blocks.stop - blocks.start and all(
            known is not None and pool.blocks[block_id].block_hash is known
            for block_id, known in zip(block_ids, hashes, strict=True)
        )
        return BlockSource(block_ids, first % block_size) if is_valid else None


def place_in(
    pool: BlockPool, span: Span, block_ids: Sequence[int], *, block_size: int, step: int = 0
) -> BlockPlace:
    """Return the place of these positions of a request with these blocks."""
    first, end = span.start // block_size, -(-span.end // block_size)
    own = tuple(block_ids[first:end])
    hashes = tuple(hash_of(pool, each, (first + n + 1) * block_size) for n, each in enumerate(own))
    return BlockPlace(span.start - first * block_size, own, hashes, len(span), step)


def hash_of(pool: BlockPool, block_id: int, num_tokens: int) -> BlockHashWithGroupId | None:
    """Return the hash of a block that is full with the first `num_tokens` of its prompt; else None."""
    block = pool.blocks[block_id]
    return block.block_hash if block.block_hash_num_tokens == num_tokens else None
