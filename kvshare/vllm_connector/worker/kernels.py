"""
Triton kernels: rows of many tokens between a staging buffer and vLLM's paged caches, in one launch for all
layers, heads and copies; and the sums of pieces in staging.

Imported only where there are Triton and a GPU. Work is launched on torch's current device, in its current
stream. What is to be done stands in a table of `kernel_tables.py`, which each call copies to the device.

    staging    [k, v][token][dim] of each piece, one after the other
    caches     (B, H, N, 2 D) of each layer, any strides but the last; layout "content" of `block_layout.py`
    program    some tokens of one piece; or one chunk of a piece that is added up

Elements are copied as integers of their size, so that rows that do not move keep every bit.
"""
# mypy: disallow-untyped-defs=false, disallow-incomplete-defs=false, disallow-untyped-decorators=false
# The arguments of kernels are Triton's: pointers, numbers and constants.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from kvshare.kv.to_device import to_device
from kvshare.vllm_connector.worker.kernel_tables import (
    ALIGNMENT,
    CHUNK_WORDS,
    MovementTable,
    StagedCopy,
    StagedPart,
    StagingForm,
    SumTable,
    TokenTable,
)

TILE = 2048  # elements of K, and as many of V, that a program copies
SUM_BLOCK = 1024  # words that a program reads at once
PARTS_AT_ONCE = 256  # among which a program looks for its own
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_FLOATS = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def gather(caches: Sequence[torch.Tensor], staging: torch.Tensor, copies: Sequence[StagedCopy]) -> None:
    """
    Copy rows of all layers into staging, in the order of extents. One launch.

    Shapes:  caches L of (B, H, N, 2 D); staging (bytes,) uint8 on the same device
    Raises:  ValueError for caches or parts that cannot be addressed
    """
    table = _table(caches, staging, copies)
    if not table.columns.size:
        return
    pointers, tokens = to_device(staging.device, _pointers(caches), table.columns)
    grid, form = _form(caches, table)
    gather_rows[grid](_elements(staging, caches), pointers, tokens, **form)


def scatter(
    caches: Sequence[torch.Tensor],
    staging: torch.Tensor,
    copies: Sequence[StagedCopy],
    movements: MovementTable,
) -> None:
    """
    Write rows of staging into the caches of all layers, rotated to their new positions in float32. One
    launch, and three for the angles if anything moves. No slot is written twice.

    Shapes:  as `gather`
    Raises:  ValueError as `gather`, and if rows are to move where that is not known or not possible
    """
    table = _table(caches, staging, copies)
    movements.check(table.shifts, caches[0].dtype)
    if not table.columns.size:
        return
    pointers, tokens, shifts = to_device(staging.device, _pointers(caches), table.columns, table.shifts)
    cos, sin = movements.angles(shifts)
    number = _FLOATS.get(caches[0].dtype)
    moves_k, moves_v = (moves and number is not None for moves in movements.moves)
    grid, form = _form(caches, table)
    scatter_rows[grid](
        _elements(staging, caches), pointers, tokens, cos, sin, movements.partners, movements.number_of,
        num_movements=len(movements.partners), MOVES_K=moves_k, MOVES_V=moves_v, FLOAT=number, **form,
        enable_fp_fusion=False,  # rounded as by torch's operations
    )  # fmt: skip


def sums(staging: torch.Tensor, parts: Sequence[StagedPart], *, dim: int, itemsize: int) -> torch.Tensor:
    """
    The sum of each piece's words, which wraps around. One launch.

    Shapes:  staging (bytes,) uint8 -> (all pieces,) int64, by part and piece, on the device
    Units:   itemsize in bytes, of the rows' elements; words as `kv/sums.py` says
    """
    table = SumTable.of(parts, StagingForm(len(staging), dim, itemsize))
    found = torch.zeros(table.num_pieces, dtype=torch.int64, device=staging.device)
    if table.num_programs:
        (columns,) = to_device(staging.device, table.columns)
        words = _whole(staging).view(table.word)
        add_words[(table.num_programs,)](
            words, columns, len(parts), found,
            CHUNK=CHUNK_WORDS, BLOCK=SUM_BLOCK, PARTS=PARTS_AT_ONCE,
        )  # fmt: skip
    return found


def _table(caches: Sequence[torch.Tensor], staging: torch.Tensor, copies: Sequence[StagedCopy]) -> TokenTable:
    num_blocks, num_heads, size, width = caches[0].shape
    form = StagingForm(len(staging), width // 2, caches[0].itemsize)
    return TokenTable.of(copies, form, num_slots=num_blocks * size, num_pieces=num_heads * len(caches))


def _pointers(caches: Sequence[torch.Tensor]) -> np.ndarray[Any, np.dtype[np.int64]]:
    first = caches[0]
    for layer, cache in enumerate(caches):
        if (cache.shape, cache.stride(), cache.dtype) != (first.shape, first.stride(), first.dtype):
            raise ValueError(f"layer {layer} has a cache of another form than layer 0")
    if first.stride(-1) != 1 or first.itemsize not in _INTEGERS:
        raise ValueError(f"a cache of {first.dtype} and strides {first.stride()} cannot be addressed")
    pointers = np.array([cache.data_ptr() for cache in caches], np.int64)
    if (pointers % ALIGNMENT).any():
        raise ValueError(f"a layer's cache does not begin at a multiple of {ALIGNMENT} bytes")
    return pointers


def _whole(staging: torch.Tensor) -> torch.Tensor:
    """Up to its last whole word of any size."""
    if staging.dtype != torch.uint8 or staging.data_ptr() % ALIGNMENT:
        raise ValueError(f"staging is {staging.dtype} at {staging.data_ptr()}, not aligned bytes")
    return staging[: len(staging) // ALIGNMENT * ALIGNMENT]


def _elements(staging: torch.Tensor, caches: Sequence[torch.Tensor]) -> torch.Tensor:
    return _whole(staging).view(_INTEGERS[caches[0].itemsize])


def _form(caches: Sequence[torch.Tensor], table: TokenTable) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid, and arguments of both kernels. All but the first two are the same for every batch."""
    _, _, size, width = caches[0].shape
    stride_block, stride_head, stride_token, _ = caches[0].stride()
    padded = triton.next_power_of_2(width // 2)
    at_once = max(1, TILE // padded)
    num_tokens = table.columns.shape[1]
    return (triton.cdiv(num_tokens, at_once), len(table.pieces)), {
        "num_tokens": num_tokens,
        "first_piece": table.pieces.start,
        "stride_block": stride_block,
        "stride_head": stride_head,
        "stride_token": stride_token,
        "NUM_LAYERS": len(caches),
        "BLOCK_SIZE": size,
        "DIM": width // 2,
        "PADDED": padded,
        "UNIT": StagingForm(0, width // 2, caches[0].itemsize).unit,
        "TOKENS": at_once,
    }


@triton.jit
def _find_rows(
    tokens, num_tokens, piece, stride_block, stride_head, stride_token,
    NUM_LAYERS: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, UNIT: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """
    For each token of this program: where its K begins in staging, how far on its V is there, where both are
    in a layer's cache, the number of its shift, and whether its part has this piece.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_token = token < num_tokens
    column = tokens + token
    start = tl.load(column, is_token, other=0) * UNIT
    length = tl.load(column + num_tokens, is_token, other=0) * DIM
    first = tl.load(column + 2 * num_tokens, is_token, other=0)
    end = tl.load(column + 3 * num_tokens, is_token, other=0)
    slot = tl.load(column + 4 * num_tokens, is_token, other=0)
    shift = tl.load(column + 5 * num_tokens, is_token, other=0)
    head = (piece // NUM_LAYERS).to(tl.int64)
    cached = slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_token + head * stride_head
    staged = start + (piece - first) * 2 * length
    return staged, length, cached, shift, (piece >= first) & (piece < end)


@triton.jit
def _cache_of(pointers, layer, staging):
    cache = tl.load(pointers + layer).to(staging.dtype)
    return tl.multiple_of(cache, 16)


@triton.jit(do_not_specialize=["num_tokens", "first_piece"])
def gather_rows(
    staging, pointers, tokens, num_tokens, first_piece, stride_block, stride_head, stride_token,
    NUM_LAYERS: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    UNIT: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    piece = first_piece + tl.program_id(1)
    staged, v_ahead, cached, _, has_piece = _find_rows(
        tokens, num_tokens, piece, stride_block, stride_head, stride_token,
        NUM_LAYERS, BLOCK_SIZE, DIM, UNIT, TOKENS,
    )  # fmt: skip
    dims = tl.arange(0, PADDED)[None, :]
    inside = has_piece[:, None] & (dims < DIM)
    there = _cache_of(pointers, piece % NUM_LAYERS, staging) + cached[:, None] + dims
    here = staging + staged[:, None] + dims
    k = tl.load(there, inside)
    v = tl.load(there + DIM, inside)
    tl.store(here, k, inside)
    tl.store(here + v_ahead[:, None], v, inside)


@triton.jit
def _moved(
    rows, staged, shift, inside, cos, sin, partners, movement, num_movements,
    DIM: tl.constexpr, PADDED: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    """Rows (TOKENS, PADDED) from `staged`, rotated where they move; else bit by bit as they are."""
    dims = tl.arange(0, PADDED)
    partner = tl.load(partners + movement * DIM + dims, dims < DIM, other=0)[None, :]
    others = tl.load(staged + partner, inside, other=0)
    angle = (shift * num_movements + movement)[:, None] * DIM + dims[None, :]
    x = rows.to(FLOAT, bitcast=True).to(tl.float32)
    y = others.to(FLOAT, bitcast=True).to(tl.float32)
    turned = x * tl.load(cos + angle, inside, other=0) + y * tl.load(sin + angle, inside, other=0)
    moves = (shift != 0)[:, None] & (partner != dims[None, :])
    return tl.where(moves, turned.to(FLOAT).to(rows.dtype, bitcast=True), rows)


@triton.jit(do_not_specialize=["num_tokens", "first_piece", "num_movements"])
def scatter_rows(
    staging, pointers, tokens, cos, sin, partners, number_of, num_movements,
    num_tokens, first_piece, stride_block, stride_head, stride_token,
    NUM_LAYERS: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    UNIT: tl.constexpr, TOKENS: tl.constexpr,
    MOVES_K: tl.constexpr, MOVES_V: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    piece = first_piece + tl.program_id(1)
    layer = piece % NUM_LAYERS
    staged, v_ahead, cached, shift, has_piece = _find_rows(
        tokens, num_tokens, piece, stride_block, stride_head, stride_token,
        NUM_LAYERS, BLOCK_SIZE, DIM, UNIT, TOKENS,
    )  # fmt: skip
    dims = tl.arange(0, PADDED)[None, :]
    inside = has_piece[:, None] & (dims < DIM)
    there = _cache_of(pointers, layer, staging) + cached[:, None] + dims
    of_k = staging + staged[:, None]
    of_v = of_k + v_ahead[:, None]
    any_moves = tl.max(shift, 0) > 0
    k = tl.load(of_k + dims, inside)
    v = tl.load(of_v + dims, inside)
    if MOVES_K:
        movement = tl.load(number_of + layer)
        if any_moves & (movement > 0):
            k = _moved(
                k, of_k, shift, inside, cos, sin, partners, movement, num_movements, DIM, PADDED, FLOAT
            )
    if MOVES_V:
        movement = tl.load(number_of + NUM_LAYERS + layer)
        if any_moves & (movement > 0):
            v = _moved(
                v, of_v, shift, inside, cos, sin, partners, movement, num_movements, DIM, PADDED, FLOAT
            )
    tl.store(there, k, inside)
    tl.store(there + DIM, v, inside)


@triton.jit(do_not_specialize=["num_parts"])
def add_words(words, parts, num_parts, found, CHUNK: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    program = tl.program_id(0)
    number_after = 0  # of this program's part
    for at in range(0, num_parts, PARTS):
        number = at + tl.arange(0, PARTS)
        begins = tl.load(parts + number, number < num_parts, other=1 << 62)
        number_after += tl.sum((begins <= program).to(tl.int32), 0)
    column = parts + number_after - 1
    task = program - tl.load(column)
    start = tl.load(column + num_parts)
    length = tl.load(column + 2 * num_parts)
    chunks = tl.cdiv(length, CHUNK)
    piece, begin = task // chunks, task % chunks * CHUNK
    total = tl.zeros((BLOCK,), tl.int64)
    for at in range(0, CHUNK, BLOCK):
        place = begin + at + tl.arange(0, BLOCK)
        total += tl.load(words + start + piece * length + place, place < length, other=0).to(tl.int64)
    tl.atomic_add(found + tl.load(column + 3 * num_parts) + piece, tl.sum(total, 0), sem="relaxed")
