"""
Triton kernels that compute what some rows of a pass attend to. They read the keys in vLLM's cache.

Imported only where there are Triton and a GPU, as `kernels.py` is. Each layer takes two launches of kernels
and a sum. The keys are read twice, and no score is written to memory.

    query rows   those of all query heads that share a key head, G N: row r is row r % N of head r // N
    tile         ROWS query rows and SLOTS slots: one product
    chunk        tiles one after the other, of a program each
    sums         (H, chunks, G N), logarithms (base 2) of a row's sum of exponentials in a chunk
    attended     (H row tiles, S), a row for each tile: added up in a fixed order, so that all ranks agree
"""
# mypy: disallow-untyped-defs=false, disallow-incomplete-defs=false, disallow-untyped-decorators=false
# The arguments of kernels are Triton's: pointers, numbers and constants.

from __future__ import annotations

from functools import cache as remembered
from typing import Any

import torch
import triton
import triton.language as tl

from kvshare.kv.listening import ListeningRows
from kvshare.sharing.plan import MAX_LISTENERS

PROGRAMS = 256  # of a launch, about: two for each multiprocessor; more chunks mean more sums to read
SHARED_BYTES = 68 * 1024  # the most of a multiprocessor's memory that a program needs
_LOG2_E = 1.4426950408889634


@remembered
def has_room(device: torch.device) -> bool:
    """Return whether a GPU can run these kernels: NVIDIA's since Ampere can, others have 64 KiB."""
    found = torch.cuda.get_device_properties(device)
    room = getattr(found, "shared_memory_per_block_optin", found.shared_memory_per_block)
    return int(room) >= SHARED_BYTES


def listen(
    rows: ListeningRows,
    layer: int,
    query: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    *,
    scaling: float,
) -> None:
    """
    Do what `ListeningRows.observe` does for plain attention, without rounding to 16 bits in between.

    Shapes:  query (M, H_q, D) of all rows of the pass; cache (B, H, T, 2 D) of the layer, layout "content";
             table (blocks,) of the slots [0, rows.end)
    Raises:  ValueError for rows that cannot be addressed
    """
    if query.dtype != cache.dtype or query.stride(-1) != 1 or cache.stride(-1) != 1:
        raise ValueError(
            f"queries of {query.dtype} and strides {query.stride()} with keys of {cache.dtype} and strides "
            f"{cache.stride()}: expected one dtype, and rows without gaps"
        )
    num_heads, num_rows = cache.shape[1], len(rows.positions)
    form = _form(query, cache)
    num_row_tiles = triton.cdiv(num_rows * form["GROUP"], form["ROWS"])
    num_tiles = triton.cdiv(rows.end, form["SLOTS"])
    per_chunk = triton.cdiv(num_tiles, max(1, PROGRAMS // (num_heads * num_row_tiles)))
    grid = (num_row_tiles, triton.cdiv(num_tiles, per_chunk), num_heads)
    sums = query.new_empty((num_heads, grid[1], num_rows * form["GROUP"]), dtype=torch.float32)
    attended = query.new_empty((num_heads * num_row_tiles, rows.end), dtype=torch.float32)
    total = rows.total(layer)
    common = (query, rows.indices, rows.positions, cache, table, sums)
    numbers = (num_rows, rows.end, per_chunk, scaling * _LOG2_E)
    strides = (*query.stride()[:2], *cache.stride()[:3])
    add_exponentials[grid](*common, *numbers, *strides, **form)
    add_weights[grid](*common, total, attended, 1 / query.shape[1], *numbers, *strides, **form)
    torch.sum(attended, dim=0, out=total)


def _form(query: torch.Tensor, cache: torch.Tensor) -> dict[str, Any]:
    """Return the arguments that are the same for every pass: a kernel is compiled once for a model."""
    _, num_heads, block_size, width = cache.shape
    group, padded = query.shape[1] // num_heads, max(16, triton.next_power_of_2(width // 2))
    most_rows, most_slots = (128, 64) if cache.itemsize == 2 else (32, 16)  # float32 has no tensor cores
    fewer = max(1, padded // 128)
    return {
        "GROUP": group,
        "BLOCK_SIZE": block_size,
        "DIM": width // 2,
        "PADDED": padded,
        "ROWS": min(max(16, most_rows // fewer), triton.next_power_of_2(group * MAX_LISTENERS)),
        "SLOTS": max(16, most_slots // fewer),
        "num_warps": 4 if cache.itemsize == 2 else 8,
    }


@triton.jit
def _rows(
    query, indices, positions, num_rows, stride_row, stride_query_head,
    GROUP: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Return the queries (ROWS, PADDED) of this program, and their rows' positions: -1 after the last one."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows * GROUP
    place = tl.load(indices + row % num_rows, is_row, other=0).to(tl.int64)
    head = (tl.program_id(2) * GROUP + row // num_rows).to(tl.int64)
    dims = tl.arange(0, PADDED)[None, :]
    start = query + (place * stride_row + head * stride_query_head)[:, None]
    queries = tl.load(start + dims, is_row[:, None] & (dims < DIM), other=0.0)
    return queries, tl.load(positions + row % num_rows, is_row, other=-1), row, is_row


@triton.jit
def _scores(
    queries, position, slot, cache, table, num_slots, factor, stride_block, stride_head, stride_token,
    BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Score queries against the keys in these slots, base 2: (ROWS, SLOTS), -inf where a row does not see."""
    is_slot = slot < num_slots
    block = tl.load(table + slot // BLOCK_SIZE, is_slot, other=0).to(tl.int64)
    start = block * stride_block + (slot % BLOCK_SIZE) * stride_token
    start += tl.program_id(2).to(tl.int64) * stride_head
    dims = tl.arange(0, PADDED)[None, :]
    keys = tl.load(cache + start[:, None] + dims, is_slot[:, None] & (dims < DIM), other=0.0)
    products = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    return tl.where(slot[None, :] <= position[:, None], products * factor, float("-inf"))


@triton.jit(do_not_specialize=["num_rows", "num_slots", "per_chunk"])
def add_exponentials(
    query, indices, positions, cache, table, sums, num_rows, num_slots, per_chunk, factor,
    stride_row, stride_query_head, stride_block, stride_head, stride_token,
    GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    queries, position, row, is_row = _rows(
        query, indices, positions, num_rows, stride_row, stride_query_head, GROUP, DIM, PADDED, ROWS
    )
    chunk = tl.program_id(1)
    highest = tl.full((ROWS,), -1e30, tl.float32)  # finite: a chunk may be hidden from a row
    total = tl.zeros((ROWS,), tl.float32)
    for tile in range(chunk * per_chunk, (chunk + 1) * per_chunk):
        scores = _scores(
            queries, position, tile * SLOTS + tl.arange(0, SLOTS), cache, table, num_slots, factor,
            stride_block, stride_head, stride_token, BLOCK_SIZE, DIM, PADDED,
        )  # fmt: skip
        higher = tl.maximum(highest, tl.max(scores, 1))
        total = total * tl.exp2(highest - higher) + tl.sum(tl.exp2(scores - higher[:, None]), 1)
        highest = higher
    there = sums + (tl.program_id(2) * tl.num_programs(1) + chunk) * num_rows * GROUP + row
    tl.store(there, highest + tl.log2(total), is_row)


@triton.jit
def _whole_sum(sums, row, is_row, num_all, ROWS: tl.constexpr):
    """Return the logarithm of each row's sum over all chunks."""
    num_chunks = tl.num_programs(1)
    CHUNKS: tl.constexpr = 16  # at once
    first = sums + tl.program_id(2) * num_chunks * num_all + row[None, :]
    highest = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for at in range(0, num_chunks, CHUNKS):
        chunk = at + tl.arange(0, CHUNKS)[:, None]
        part = tl.load(first + chunk * num_all, (chunk < num_chunks) & is_row[None, :], other=float("-inf"))
        higher = tl.maximum(highest, tl.max(part, 0))
        total = total * tl.exp2(highest - higher) + tl.sum(tl.exp2(part - higher[None, :]), 0)
        highest = higher
    return highest + tl.log2(total)


@triton.jit(
    do_not_specialize=["num_rows", "num_slots", "per_chunk"],
    do_not_specialize_on_alignment=["before"],
)
def add_weights(
    query, indices, positions, cache, table, sums, before, attended, share,
    num_rows, num_slots, per_chunk, factor,
    stride_row, stride_query_head, stride_block, stride_head, stride_token,
    GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """`before`: what was attended in earlier passes, for the first program of each slot to add."""
    queries, position, row, is_row = _rows(
        query, indices, positions, num_rows, stride_row, stride_query_head, GROUP, DIM, PADDED, ROWS
    )
    whole = _whole_sum(sums, row, is_row, num_rows * GROUP, ROWS)
    chunk, number = tl.program_id(1), tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    own = attended + number.to(tl.int64) * num_slots
    for tile in range(chunk * per_chunk, (chunk + 1) * per_chunk):
        slot = tile * SLOTS + tl.arange(0, SLOTS)
        scores = _scores(
            queries, position, slot, cache, table, num_slots, factor,
            stride_block, stride_head, stride_token, BLOCK_SIZE, DIM, PADDED,
        )  # fmt: skip
        # Of rows after the last one the sum is 0, its logarithm -inf.
        weights = tl.where(is_row[:, None], tl.exp2(scores - whole[:, None]), 0.0)
        found = tl.sum(weights, 0) * share
        found += tl.load(before + slot, (slot < num_slots) & (number == 0), other=0.0)
        tl.store(own + slot, found, slot < num_slots)
