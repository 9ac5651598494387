"""
Triton kernels: rows of many tokens between a staging buffer and vLLM's paged caches, in one launch for all
layers, heads and copies; and the sums of pieces in staging.

Imported only where there are Triton and a GPU. Work is launched on torch's current device, in its current
stream. What is to be done stands in a table of `kernel_tables.py`, which each call copies to the device.

    staging    [k, v][token][dim] of each piece, one after the other
    caches     (B, H, N, 2 D) of each layer, any strides but the last; layout "content" of `block_layout.py`
    program    a block of tokens and one piece of each; or one chunk of a piece that is added up

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
    if not table.programs.size:
        return
    pointers, tokens, programs = to_device(staging.device, _pointers(caches), table.columns, table.programs)
    gather_rows[(table.programs.shape[1],)](
        _elements(staging, caches), pointers, programs, tokens, table.columns.shape[1], **_form(caches)
    )


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
    if not table.programs.size:
        return
    pointers, tokens, programs, shifts = to_device(
        staging.device, _pointers(caches), table.columns, table.programs, table.shifts
    )
    cos, sin = movements.angles(shifts)
    number = _FLOATS.get(caches[0].dtype)
    moves_k, moves_v = (moves and number is not None for moves in movements.moves)
    scatter_rows[(table.programs.shape[1],)](
        _elements(staging, caches), pointers, programs, tokens, table.columns.shape[1],
        cos, sin, movements.partners, movements.number_of, len(movements.partners),
        MOVES_K=moves_k, MOVES_V=moves_v, FLOAT=number, **_form(caches),
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


def _form(caches: Sequence[torch.Tensor]) -> dict[str, int]:
    """Arguments of both kernels that are the same for every batch."""
    _, _, size, width = caches[0].shape
    stride_block, stride_head, stride_token, _ = caches[0].stride()
    staging = StagingForm(0, width // 2, caches[0].itemsize)
    return {
        "stride_block": stride_block,
        "stride_head": stride_head,
        "stride_token": stride_token,
        "NUM_LAYERS": len(caches),
        "BLOCK_SIZE": size,
        "DIM": staging.dim,
        "PADDED": triton.next_power_of_2(staging.dim),
        "UNIT": staging.unit,
        "TOKENS": staging.block,
    }


@triton.jit
def _find_rows(
    pointers, programs, tokens, num_tokens, stride_block, stride_head, stride_token,
    NUM_LAYERS: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, UNIT: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """
    For each token of this program: where its K begins in staging and how far on its V is there, its layer's
    cache and where both begin in that, its layer, its shift's number, and whether its part has this piece.
    """
    program = tl.program_id(0)
    token = tl.load(programs + program) * TOKENS + tl.arange(0, TOKENS)
    index = tl.load(programs + tl.num_programs(0) + program)
    is_token = token < num_tokens
    column = tokens + token
    start = tl.load(column, is_token, other=0) * UNIT
    length = tl.load(column + num_tokens, is_token, other=0) * DIM
    piece = tl.load(column + 2 * num_tokens, is_token, other=0) + index
    has_piece = index < tl.load(column + 3 * num_tokens, is_token, other=0)
    slot = tl.load(column + 4 * num_tokens, is_token, other=0)
    shift = tl.load(column + 5 * num_tokens, is_token, other=0)
    layer = piece % NUM_LAYERS
    cached = slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_token
    cached += piece // NUM_LAYERS * stride_head
    cache = tl.load(pointers + layer, has_piece, other=0)
    return start + index * 2 * length, length, cache, cached, layer, shift, has_piece


@triton.jit(do_not_specialize=["num_tokens"])
def gather_rows(
    staging, pointers, programs, tokens, num_tokens, stride_block, stride_head, stride_token,
    NUM_LAYERS: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    UNIT: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    staged, v_ahead, cache, cached, _, _, has_piece = _find_rows(
        pointers, programs, tokens, num_tokens, stride_block, stride_head, stride_token,
        NUM_LAYERS, BLOCK_SIZE, DIM, UNIT, TOKENS,
    )  # fmt: skip
    dims = tl.arange(0, PADDED)[None, :]
    inside = has_piece[:, None] & (dims < DIM)
    there = tl.multiple_of(cache.to(staging.dtype), 16)[:, None] + cached[:, None] + dims
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
    dims = tl.arange(0, PADDED)[None, :]
    partner = tl.load(partners + movement[:, None] * DIM + dims, inside, other=0)
    others = tl.load(staged + partner, inside, other=0)
    angle = (shift * num_movements + movement)[:, None] * DIM + dims
    x = rows.to(FLOAT, bitcast=True).to(tl.float32)
    y = others.to(FLOAT, bitcast=True).to(tl.float32)
    turned = x * tl.load(cos + angle, inside, other=0) + y * tl.load(sin + angle, inside, other=0)
    return tl.where(partner != dims, turned.to(FLOAT).to(rows.dtype, bitcast=True), rows)


@triton.jit(do_not_specialize=["num_tokens", "num_movements"])
def scatter_rows(
    staging, pointers, programs, tokens, num_tokens, cos, sin, partners, number_of, num_movements,
    stride_block, stride_head, stride_token,
    NUM_LAYERS: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    UNIT: tl.constexpr, TOKENS: tl.constexpr,
    MOVES_K: tl.constexpr, MOVES_V: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    staged, v_ahead, cache, cached, layer, shift, has_piece = _find_rows(
        pointers, programs, tokens, num_tokens, stride_block, stride_head, stride_token,
        NUM_LAYERS, BLOCK_SIZE, DIM, UNIT, TOKENS,
    )  # fmt: skip
    dims = tl.arange(0, PADDED)[None, :]
    inside = has_piece[:, None] & (dims < DIM)
    there = tl.multiple_of(cache.to(staging.dtype), 16)[:, None] + cached[:, None] + dims
    of_k = staging + staged[:, None]
    of_v = of_k + v_ahead[:, None]
    k = tl.load(of_k + dims, inside)
    v = tl.load(of_v + dims, inside)
    if MOVES_K:
        movement = tl.load(number_of + layer, has_piece & (shift != 0), other=0)
        if tl.max(movement, 0) > 0:
            k = _moved(
                k, of_k, shift, inside, cos, sin, partners, movement, num_movements, DIM, PADDED, FLOAT
            )
    if MOVES_V:
        movement = tl.load(number_of + NUM_LAYERS + layer, has_piece & (shift != 0), other=0)
        if tl.max(movement, 0) > 0:
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
