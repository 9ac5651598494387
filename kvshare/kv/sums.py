"""
Sums of KV bytes, by which accidental corruption is noticed before the bytes are used.

The sum of a piece is the sum of its words as signed integers, modulo 2**64. So a single flipped bit always
changes it, a device can add in any order, and it can be computed while the bytes are copied.
"""

from __future__ import annotations

import torch

_WORDS = (torch.int64, torch.int32, torch.int16, torch.int8)
_CHUNK_BYTES = 1024 * 1024  # bytes that are copied, then added up while they are in a CPU's cache
_ODD = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio
_MASK = 2**64 - 1


def word_of(num_bytes: int) -> torch.dtype:
    """Return the widest integer type whose size divides `num_bytes`."""
    return next(word for word in _WORDS if num_bytes % word.itemsize == 0)


def sums(pieces: torch.Tensor, *, row_bytes: int) -> torch.Tensor:
    """
    Return the sum of each piece's words.

    Shapes:  pieces (..., E) of any dtype, E contiguous elements each -> (...) int64 on the same device
    Units:   row_bytes divides the bytes of every piece, and decides the size of a word
    """
    return pieces.view(word_of(row_bytes)).sum(dim=-1, dtype=torch.int64)


def copy_and_sum(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """
    Copy `source` to `target`, and add up the copied words in the same pass over memory.

    Shapes:  target (N, T, ...) contiguous; source the same with any strides, on any device -> (N,) int64 on
             the device of `target`: the sums of its N pieces, with the bytes of a row (...) as `row_bytes`
    """
    if source.device != target.device:  # sums on the device take less time than many small copies
        source = source.contiguous()
        totals = sums(source.flatten(1), row_bytes=max(1, source[:1, :1].nbytes)).to(target.device)
        target.copy_(source)
        return totals
    row_bytes = max(1, target[:1, :1].nbytes)
    if target.nbytes <= _CHUNK_BYTES:
        target.copy_(source)
        return sums(target.flatten(1), row_bytes=row_bytes)
    num_pieces, num_rows = target.shape[:2]
    totals = torch.zeros(num_pieces, dtype=torch.int64, device=target.device)
    step = max(1, _CHUNK_BYTES // row_bytes)  # rows at once: of several pieces, or a part of one piece
    at_once = max(1, step // max(1, num_rows))
    for piece in range(0, num_pieces, at_once):
        pieces = slice(piece, piece + at_once)
        for start in range(0, num_rows, step):
            part = target[pieces, start : start + step]
            part.copy_(source[pieces, start : start + step])
            totals[pieces] += sums(part.flatten(1), row_bytes=row_bytes)
    return totals


def combined(of_pieces: torch.Tensor) -> int:
    """
    Combine the sums of all pieces into one 64-bit number, which depends on their order.

    Every factor is odd, so a change of one sum always changes the result.
    """
    total = 0
    for value in of_pieces.flatten().tolist():
        total = (total * _ODD + value) & _MASK
    return total
