"""
Makes the arrays of a pass over runs: block table, slots, positions. The number of numpy calls is fixed: a
long prompt has hundreds of runs over thousands of blocks, and the GPU waits for the arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from delta_tree import Span
from kvshare.vllm_connector.metadata import Tokens

if TYPE_CHECKING:
    from kvshare.vllm_connector.worker.paged_cache import PagedCache

# The dtype of vLLM's own buffer of token ids. A compiled model reads its input as the dtype with which it was
# traced, and vLLM drops the guards that would notice another dtype: the model would read every second one of
# int64 ids as 0.
_TOKEN_DTYPE = np.int32


class PlacedRun(Protocol):
    """A run, see `partial_forward.py`. All runs of a request have the same `block_ids` object."""

    @property
    def block_ids(self) -> tuple[int, ...]: ...
    @property
    def span(self) -> Span: ...
    @property
    def token_ids(self) -> Tokens: ...
    @property
    def shift(self) -> int: ...
    @property
    def kept(self) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True, eq=False)
class PassInputs:
    """
    The arrays of a pass. `starts`: where each run begins among the rows. `ends`: each run's sequence length.

    Shapes:  token_ids (N,) int32, positions, slots (N,) int64 of all rows; starts (R + 1,), ends (R,), table
             (R, B) int32 of the runs. The table has 0 after each run's last block
    """

    token_ids: NDArray[np.int32]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    starts: NDArray[np.int32]
    ends: NDArray[np.int32]
    table: NDArray[np.int32]

    @property
    def longest(self) -> int:
        """Return the number of tokens of the longest run."""
        return int(np.diff(self.starts).max())


def pass_inputs(runs: Sequence[PlacedRun], cache: PagedCache) -> PassInputs:
    """Make the inputs of a pass, with a row for each token in the order of the runs."""
    size = cache.kernel_block_size
    begins, ends = np.array([(run.span.start, run.span.end) for run in runs], np.int64).T
    lengths = ends - begins
    starts = np.concatenate([[0], lengths.cumsum()])
    owners, tables = _tables(runs, cache)
    at = np.arange(starts[-1]) + np.repeat(begins - starts[:-1], lengths)  # position of each row
    shifts = np.array([run.shift for run in runs], np.int64)
    num_blocks = -(-ends // size)
    columns = np.arange(num_blocks.max())
    return PassInputs(
        token_ids=np.concatenate(
            [run.token_ids[run.span.start : run.span.end] for run in runs], dtype=_TOKEN_DTYPE
        ),
        positions=at + np.repeat(shifts, lengths),
        slots=tables[np.repeat(owners, lengths), at // size] * size + at % size,
        starts=starts.astype(np.int32),
        ends=ends.astype(np.int32),
        table=np.where(columns < num_blocks[:, None], tables[owners][:, columns], 0).astype(np.int32),
    )


def following_ids(runs: Sequence[PlacedRun]) -> NDArray[np.int32]:
    """Return the token after each row's token, (N,); for a prompt's last token, that token itself."""
    parts = []
    for run in runs:
        following = run.token_ids[run.span.start + 1 : run.span.end + 1]
        parts += [following, run.token_ids[-1:]] if len(following) < len(run.span) else [following]
    return np.concatenate(parts, dtype=_TOKEN_DTYPE)


def kept_rows(runs: Sequence[PlacedRun]) -> NDArray[np.bool_]:
    """Return which rows are kept, (N,): the target does not write their KV."""
    kept = []
    for run in runs:
        rows = np.zeros(len(run.span), np.bool_)
        rows[[place - run.span.start for place in run.kept if run.span.start <= place < run.span.end]] = True
        kept.append(rows)
    return np.concatenate(kept)


def _tables(runs: Sequence[PlacedRun], cache: PagedCache) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the number of each run's request, and the kernel blocks of each request up to its last run."""
    last: dict[int, PlacedRun] = {}  # by block table
    for run in runs:
        known = last.get(id(run.block_ids))
        if known is None or known.span.end < run.span.end:
            last[id(run.block_ids)] = run
    numbers = {name: number for number, name in enumerate(last)}
    blocks = [cache.kernel_blocks(run.block_ids, Span(0, run.span.end)) for run in last.values()]
    tables = np.zeros((len(blocks), max(map(len, blocks))), np.int64)
    for row, own in zip(tables, blocks, strict=True):
        row[: len(own)] = own
    return np.array([numbers[id(run.block_ids)] for run in runs], np.int64), tables
