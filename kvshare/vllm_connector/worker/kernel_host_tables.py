"""
The table that the kernel `copy_words` of `row_kernels.py` reads: which words lie where in host memory, and
where in a staging buffer. Made without a loop over heads or tokens; nothing here needs a GPU or Triton.

    segment in host memory    [head][layer][k, v][token][dim]
    piece of a batch          the batch's layers of one head: consecutive there, and in staging
    tile                      part of a piece that a program copies at once

With batches of three layers, a piece of 256 tokens has 384 KiB, and a load of 16,384 tokens 6,144 pieces. The
driver needs about 4 us for each of them, so that its copies leave half of PCIe unused, and far more where
segments are short. A kernel depends far less on their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from kvshare.vllm_connector.worker.staged_layers import StagedLayers

WORD_BYTES = 8
TILE_WORDS = 4096


def tiles(batch: Sequence[StagedLayers]) -> NDArray[np.int64] | None:
    """
    Return the tiles of a batch; None if its pieces are not made of whole words.

    Shapes:  (3, tiles): address in host memory, offset in staging in words, number of words
    """
    described = [
        (
            *(part.stored.rows.data_ptr(), part.stored.piece_bytes, part.stored.num_layers),
            *(part.stored.num_heads, part.layers.start, part.layers.stop, part.offset),
        )
        for part in batch
    ]
    parts = np.array(described, np.int64).reshape(-1, 7)
    if (parts[:, [0, 1, 6]] % WORD_BYTES).any():
        return None
    heads = parts[:, 3]
    address, piece, num_layers, _, first, end, offset = np.repeat(parts, heads, axis=0).T
    head, words = _numbered(heads), (end - first) * piece // WORD_BYTES
    address = address + (head * num_layers + first) * piece
    return cut(np.array([address, offset // WORD_BYTES + head * words, words]))


def cut(pieces: NDArray[np.int64]) -> NDArray[np.int64]:
    """Cut pieces into tiles. Shapes:  (3, pieces) -> (3, tiles), rows as in `tiles`."""
    counts = -(-pieces[2] // TILE_WORDS)
    cut_pieces, before = np.repeat(pieces, counts, axis=1), _numbered(counts) * TILE_WORDS
    cut_pieces += np.array([before * WORD_BYTES, before, -before])
    np.minimum(cut_pieces[2], TILE_WORDS, out=cut_pieces[2])
    return cut_pieces


def _numbered(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return 0, 1, .. for each count, one after the other."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
