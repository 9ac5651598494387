"""
The Triton kernels that `kernels.py` launches; its docstring says what they read. Imported only where there
are Triton and a GPU.
"""
# mypy: disallow-untyped-defs=false, disallow-incomplete-defs=false, disallow-untyped-decorators=false
# The arguments of kernels are Triton's: pointers, numbers and constants.

from __future__ import annotations

import torch
import triton
import triton.language as tl

FLOATS = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
}


@triton.jit
def _find_rows(
    pointers, programs, tokens, num_tokens, parts, num_parts, stride_block, stride_head, stride_token,
    NUM_LAYERS: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, UNIT: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """
    Return for each token of this program: the offset of its K in staging, and how much further its V is; its
    layer's cache, and the offset of both in that; its layer; its shift's number; whether its part has this
    piece.
    """
    program = tl.program_id(0)
    token = tl.load(programs + program) * TOKENS + tl.arange(0, TOKENS)
    index = tl.load(programs + tl.num_programs(0) + program)
    is_token = token < num_tokens
    column = tokens + token
    start = tl.load(column, is_token, other=0)
    length = tl.load(column + num_tokens, is_token, other=0) * DIM
    part = parts + tl.load(column + 2 * num_tokens, is_token, other=0)
    slot = tl.load(column + 3 * num_tokens, is_token, other=0)
    shift = tl.load(column + 4 * num_tokens, is_token, other=0)
    start = (start + tl.load(part, is_token, other=0)) * UNIT
    has_piece = index < tl.load(part + 2 * num_parts, is_token, other=0)
    of_head = tl.load(part + 3 * num_parts, is_token, other=1)
    piece = tl.load(part + num_parts, is_token, other=0) + index // of_head * NUM_LAYERS + index % of_head
    layer = piece % NUM_LAYERS
    cached = slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_token
    cached += piece // NUM_LAYERS * stride_head
    cache = tl.load(pointers + layer, has_piece, other=0)
    return start + index * 2 * length, length, cache, cached, layer, shift, has_piece


@triton.jit(do_not_specialize=["num_tokens", "num_parts"])
def gather_rows(
    staging, pointers, programs, tokens, num_tokens, parts, num_parts,
    stride_block, stride_head, stride_token,
    NUM_LAYERS: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    UNIT: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    staged, v_ahead, cache, cached, _, _, has_piece = _find_rows(
        pointers, programs, tokens, num_tokens, parts, num_parts, stride_block, stride_head, stride_token,
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
def rotated(
    rows, staged, shift, inside, cos, sin, partners, movement, num_movements,
    DIM: tl.constexpr, PADDED: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    dims = tl.arange(0, PADDED)[None, :]
    partner = tl.load(partners + movement[:, None] * DIM + dims, inside, other=0)
    others = tl.load(staged + partner, inside, other=0)
    angle = (shift * num_movements + movement)[:, None] * DIM + dims
    x = rows.to(FLOAT, bitcast=True).to(tl.float32)
    y = others.to(FLOAT, bitcast=True).to(tl.float32)
    turned = x * tl.load(cos + angle, inside, other=0) + y * tl.load(sin + angle, inside, other=0)
    if FLOAT.primitive_bitwidth == 8:  # clamp to the largest number that fits
        limit: tl.constexpr = 448.0 if tl.float8e4nv == FLOAT else 57344.0
        turned = tl.minimum(tl.maximum(turned, -limit), limit)
    return tl.where(partner != dims, turned.to(FLOAT).to(rows.dtype, bitcast=True), rows)


@triton.jit
def moved(
    rows, staged, shift, inside, cos, sin, partners, movement, num_movements,
    DIM: tl.constexpr, PADDED: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    """Return rows (TOKENS, PADDED), rotated if they move; others keep every bit."""
    if tl.max(movement, 0) > 0:
        rows = rotated(
            rows, staged, shift, inside, cos, sin, partners, movement, num_movements, DIM, PADDED, FLOAT
        )
    return rows


@triton.jit(do_not_specialize=["num_tokens", "num_parts", "num_movements"])
def scatter_rows(
    staging, pointers, programs, tokens, num_tokens, parts, num_parts,
    cos, sin, partners, number_of, num_movements, stride_block, stride_head, stride_token,
    NUM_LAYERS: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    UNIT: tl.constexpr, TOKENS: tl.constexpr,
    MOVES_K: tl.constexpr, MOVES_V: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    staged, v_ahead, cache, cached, layer, shift, has_piece = _find_rows(
        pointers, programs, tokens, num_tokens, parts, num_parts, stride_block, stride_head, stride_token,
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
        k = moved(k, of_k, shift, inside, cos, sin, partners, movement, num_movements, DIM, PADDED, FLOAT)
    if MOVES_V:
        movement = tl.load(number_of + NUM_LAYERS + layer, has_piece & (shift != 0), other=0)
        v = moved(v, of_v, shift, inside, cos, sin, partners, movement, num_movements, DIM, PADDED, FLOAT)
    tl.store(there, k, inside)
    tl.store(there + DIM, v, inside)


@triton.jit(do_not_specialize=["num_parts"], do_not_specialize_on_alignment=["found"])
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


@triton.jit(do_not_specialize=["count", "first", "end"])
def copy_words(
    tiles, count, first, end, staging, UP: tl.constexpr, WORDS: tl.constexpr, PROGRAMS: tl.constexpr
):  # fmt: skip
    """Copy words between registered host memory, by address, and staging. A program takes every n-th tile."""
    at = tl.arange(0, WORDS)
    for tile in range(first + tl.program_id(0), end, PROGRAMS):
        there = tl.load(tiles + tile).to(tl.pointer_type(tl.int64)) + at
        here = staging + tl.load(tiles + count + tile) + at
        inside = at < tl.load(tiles + 2 * count + tile)
        if UP:
            tl.store(here, tl.load(there, inside), inside)
        else:
            tl.store(there, tl.load(here, inside), inside)
