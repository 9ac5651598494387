"""
A Triton kernel that copies rows of many tokens from blocks of vLLM's paged caches to other blocks, in one
launch for all layers and heads.

Imported only where there are Triton and a GPU. Work is launched on torch's current device, in its current
stream, as in `kernels.py`, whose caches these are.

    program    a block of tokens, in one layer of one head
"""
# mypy: disallow-untyped-defs=false, disallow-incomplete-defs=false, disallow-untyped-decorators=false
# The arguments of kernels are Triton's: pointers, numbers and constants.

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kvshare.kv.to_device import to_device
from kvshare.vllm_connector.worker.kernel_tables import MovementTable, SlotTable
from kvshare.vllm_connector.worker.kernels import cache_pointers, form_of
from kvshare.vllm_connector.worker.row_kernels import FLOATS, moved

_INTEGERS = {1: tl.int8, 2: tl.int16, 4: tl.int32}


def copy_rows(caches: Sequence[torch.Tensor], table: SlotTable, movements: MovementTable) -> None:
    """
    Copy rows from slots to slots in all layers, rotated to their new positions in float32. One launch, and
    three for the angles if anything moves. The caller makes sure that no slot is written twice, or both read
    and written.

    Shapes:  caches L of (B, H, N, 2 D)
    Raises:  ValueError for caches that cannot be addressed, for slots that they do not have, and if rows are
             to move in a layer whose movement is unknown, or cannot be rotated
    """
    num_blocks, num_heads, size, _ = caches[0].shape
    table.check(num_slots=num_blocks * size)
    movements.check(table.shifts, caches[0].dtype)
    pointers = cache_pointers(caches)
    if not table.columns.size:
        return
    there, tokens, shifts = to_device(caches[0].device, pointers, table.columns, table.shifts)
    cos, sin = movements.angles(shifts)
    number = FLOATS.get(caches[0].dtype)
    moves_k, moves_v = (moves and number is not None for moves in movements.moves)
    form, num_tokens = form_of(caches), table.columns.shape[1]
    num_pieces = num_heads * len(caches)
    form.pop("UNIT")
    copy_slots[(triton.cdiv(num_tokens, form["TOKENS"]) * num_pieces,)](
        there, tokens, num_tokens, cos, sin, movements.partners, movements.number_of, len(movements.partners),
        NUM_HEADS=num_heads, INTEGER=_INTEGERS[caches[0].itemsize],
        MOVES_K=moves_k, MOVES_V=moves_v, FLOAT=number, **form,
        enable_fp_fusion=False,  # rounded as by torch's operations
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "num_movements"])
def copy_slots(
    pointers, tokens, num_tokens, cos, sin, partners, number_of, num_movements,
    stride_block, stride_head, stride_token,
    NUM_LAYERS: tl.constexpr, NUM_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr,
    PADDED: tl.constexpr, TOKENS: tl.constexpr, INTEGER: tl.constexpr,
    MOVES_K: tl.constexpr, MOVES_V: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    head = program % NUM_HEADS
    token = program // (NUM_HEADS * NUM_LAYERS) * TOKENS + tl.arange(0, TOKENS)
    is_token = token < num_tokens
    layer = program // NUM_HEADS % NUM_LAYERS + tl.zeros((TOKENS,), tl.int32)
    source = tl.load(tokens + token, is_token, other=0)
    target = tl.load(tokens + num_tokens + token, is_token, other=0)
    shift = tl.load(tokens + 2 * num_tokens + token, is_token, other=0)
    dims = tl.arange(0, PADDED)[None, :]
    inside = is_token[:, None] & (dims < DIM)
    cache = tl.load(pointers + layer, is_token, other=0).to(tl.pointer_type(INTEGER))
    begin = tl.multiple_of(cache, 16)[:, None] + head.to(tl.int64) * stride_head
    here = source // BLOCK_SIZE * stride_block + source % BLOCK_SIZE * stride_token
    there = target // BLOCK_SIZE * stride_block + target % BLOCK_SIZE * stride_token
    of_k = begin + here[:, None]
    k = tl.load(of_k + dims, inside)
    v = tl.load(of_k + DIM + dims, inside)
    if MOVES_K:
        movement = tl.load(number_of + layer, is_token & (shift != 0), other=0)
        k = moved(k, of_k, shift, inside, cos, sin, partners, movement, num_movements, DIM, PADDED, FLOAT)
    if MOVES_V:
        movement = tl.load(number_of + NUM_LAYERS + layer, is_token & (shift != 0), other=0)
        of_v = of_k + DIM
        v = moved(v, of_v, shift, inside, cos, sin, partners, movement, num_movements, DIM, PADDED, FLOAT)
    tl.store(begin + there[:, None] + dims, k, inside)
    tl.store(begin + there[:, None] + DIM + dims, v, inside)
