"""
Launches of our Triton kernels: rows of many tokens between a staging buffer and vLLM's paged caches, in one
launch for all layers, heads and copies; and the sums of pieces in staging.

Imported only where there are Triton and a GPU. Work is launched on torch's current device, in its current
stream. Tables of `kernel_tables.py` and `kernel_token_tables.py` describe the work. They are copied to the
device: the table of a load's tokens once, the tables of a batch with the batch.

    staging    [k, v][token][dim] of each piece, one after the other
    caches     (B, H, N, 2 D) of each layer, any strides but the last; layout "content" of `block_layout.py`
    program    a block of tokens and one piece of each; or one chunk of a piece that is added up

Elements are copied as integers of their size, so that rows that do not move keep every bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton

from kvshare.kv.to_device import to_device
from kvshare.vllm_connector.worker.cache_dtype import INTEGERS
from kvshare.vllm_connector.worker.kernel_host_tables import TILE_WORDS, WORD_BYTES
from kvshare.vllm_connector.worker.kernel_tables import (
    ALIGNMENT,
    CHUNK_WORDS,
    MovementTable,
    StagedCopy,
    StagedPart,
    StagingForm,
    SumTable,
)
from kvshare.vllm_connector.worker.kernel_token_tables import PartTable, Rows, TokenTable
from kvshare.vllm_connector.worker.row_kernels import (
    FLOATS,
    add_words,
    copy_words,
    gather_rows,
    scatter_rows,
)

SUM_BLOCK = 1024  # words that a program reads at once
PARTS_AT_ONCE = 256  # parts that a program searches at once for the one that it adds up
# Programs that copy between host memory and staging. With 32 KiB each on their way, eight should fill PCIe 5;
# more would take room from vLLM's steps. Programs of matrix products need a whole multiprocessor and wait for
# those that copy, so a launch is short: 8 MiB, .2 ms.
COPYING_PROGRAMS, COPYING_WARPS = 8, 16
COPYING_TILES = 256


@dataclass(frozen=True, slots=True, eq=False)
class Placing:
    """The data that all batches of a load share, on the device: its tokens, and the angles of its shifts."""

    table: TokenTable
    pointers: torch.Tensor
    tokens: torch.Tensor
    angles: tuple[torch.Tensor, torch.Tensor]
    movements: MovementTable


@dataclass(frozen=True, slots=True, eq=False)
class PlacedBatch:
    """The place of a batch in staging, on the device: its parts for scattering, and for adding up."""

    parts: torch.Tensor
    programs: torch.Tensor
    summed: SumTable
    columns: torch.Tensor


def gather(caches: Sequence[torch.Tensor], staging: torch.Tensor, copies: Sequence[StagedCopy]) -> None:
    """
    Copy rows of all layers into staging, at the offsets of their parts. One launch.

    Shapes:  caches L of (B, H, N, 2 D); staging (bytes,) uint8 on the same device
    Raises:  ValueError for caches or parts that cannot be addressed
    """
    table = _tokens(caches, copies)
    parts = _parts(caches, staging, table, {number: copy.part for number, copy in enumerate(copies)})
    if not parts.programs.size:
        return
    pointers, tokens, columns, programs = to_device(
        staging.device, cache_pointers(caches), table.columns, parts.columns, parts.programs
    )
    gather_rows[(parts.programs.shape[1],)](
        _elements(staging, caches), pointers, programs, tokens, table.columns.shape[1],
        columns, len(table.lengths), **form_of(caches),
    )  # fmt: skip


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
    Raises:  ValueError as `gather`, and if rows must move by an unknown movement or cannot be rotated
    """
    placing = place(caches, copies, movements, staging.device)
    parts = {number: copy.part for number, copy in enumerate(copies)}
    scatter_batch(caches, staging, placing, place_batch(caches, staging, placing, parts, []))


def place(
    caches: Sequence[torch.Tensor], copies: Sequence[Rows], movements: MovementTable, device: torch.device
) -> Placing:
    """Prepare a load, once for all of its batches. Raises ValueError as `scatter`."""
    table = _tokens(caches, copies)
    movements.check(table.shifts, caches[0].dtype)
    pointers, tokens, shifts = to_device(device, cache_pointers(caches), table.columns, table.shifts)
    return Placing(table, pointers, tokens, movements.angles(shifts), movements)


def place_batch(
    caches: Sequence[torch.Tensor],
    staging: torch.Tensor,
    placing: Placing,
    parts: Mapping[int, StagedPart],
    summed: Sequence[StagedPart],
) -> PlacedBatch:
    """
    Prepare a batch. `parts`: by the number of the copy that is made from it. `summed`: parts to add up.

    Raises:  ValueError as `scatter`
    """
    table = _parts(caches, staging, placing.table, parts)
    sum_table = SumTable.of(summed, _form(caches, staging))
    columns, programs, of_sums = to_device(staging.device, table.columns, table.programs, sum_table.columns)
    return PlacedBatch(columns, programs, sum_table, of_sums)


def scatter_batch(
    caches: Sequence[torch.Tensor], staging: torch.Tensor, placing: Placing, batch: PlacedBatch
) -> None:
    """Scatter a batch of a load. One launch."""
    if not batch.programs.shape[1]:
        return
    movements, (cos, sin) = placing.movements, placing.angles
    number = FLOATS.get(caches[0].dtype)
    moves_k, moves_v = (moves and number is not None for moves in movements.moves)
    scatter_rows[(batch.programs.shape[1],)](
        _elements(staging, caches), placing.pointers, batch.programs,
        placing.tokens, placing.tokens.shape[1], batch.parts, batch.parts.shape[1],
        cos, sin, movements.partners, movements.number_of, len(movements.partners),
        MOVES_K=moves_k, MOVES_V=moves_v, FLOAT=number, **form_of(caches),
        enable_fp_fusion=False,  # rounded as by torch's operations
    )  # fmt: skip


def sums(staging: torch.Tensor, parts: Sequence[StagedPart], *, dim: int, itemsize: int) -> torch.Tensor:
    """
    Return the sum of each piece's words, which may overflow. One launch.

    Shapes:  staging (bytes,) uint8 -> (all pieces,) int64, by part and piece, on the device
    Units:   itemsize of the rows' elements in bytes; for words see `kv/sums.py`
    """
    table = SumTable.of(parts, StagingForm(len(staging), dim, itemsize))
    totals = torch.zeros(table.num_pieces, dtype=torch.int64, device=staging.device)
    if table.num_programs:
        (columns,) = to_device(staging.device, table.columns)
        add_up(staging, table, columns, totals)
    return totals


def add_up(staging: torch.Tensor, table: SumTable, columns: torch.Tensor, found: torch.Tensor) -> None:
    """Add the words of all pieces to `found`, (pieces,) int64. One launch."""
    if table.num_programs:
        add_words[(table.num_programs,)](
            _whole(staging).view(table.word), columns, columns.shape[1], found,
            CHUNK=CHUNK_WORDS, BLOCK=SUM_BLOCK, PARTS=PARTS_AT_ONCE,
        )  # fmt: skip


def copy_host(staging: torch.Tensor, tiles: np.ndarray[Any, np.dtype[np.int64]], *, up: bool) -> None:
    """
    Copy tiles (`kernel_host_tables.py`) into staging, or out of it (not `up`). A launch for `COPYING_TILES`.

    The device must be able to address the host memory, which is registered with it.
    Raises:  ValueError for a tile that reaches past staging
    """
    count = tiles.shape[1]
    if not count:
        return
    words = _whole(staging).view(torch.int64)
    if (last := int((tiles[1] + tiles[2]).max())) > len(words) or tiles.min() < 0:
        raise ValueError(f"tiles end at byte {last * WORD_BYTES} of staging, which has {len(staging)}")
    (table,) = to_device(staging.device, tiles)
    for first in range(0, count, COPYING_TILES):
        end = min(count, first + COPYING_TILES)
        copy_words[(min(end - first, COPYING_PROGRAMS),)](
            table, count, first, end, words,
            UP=up, WORDS=TILE_WORDS, PROGRAMS=COPYING_PROGRAMS, num_warps=COPYING_WARPS,
        )  # fmt: skip


def _form(caches: Sequence[torch.Tensor], staging: torch.Tensor) -> StagingForm:
    return StagingForm(len(staging), caches[0].shape[3] // 2, caches[0].itemsize)


def _tokens(caches: Sequence[torch.Tensor], copies: Sequence[Rows]) -> TokenTable:
    num_blocks, _, size, width = caches[0].shape
    form = StagingForm(0, width // 2, caches[0].itemsize)
    return TokenTable.of(copies, form, num_slots=num_blocks * size)


def _parts(
    caches: Sequence[torch.Tensor],
    staging: torch.Tensor,
    table: TokenTable,
    parts: Mapping[int, StagedPart],
) -> PartTable:
    form, num_heads = _form(caches, staging), caches[0].shape[1]
    return PartTable.of(parts, table, form, num_heads=num_heads, num_layers=len(caches))


def cache_pointers(caches: Sequence[torch.Tensor]) -> np.ndarray[Any, np.dtype[np.int64]]:
    first = caches[0]
    for layer, cache in enumerate(caches):
        if (cache.shape, cache.stride(), cache.dtype) != (first.shape, first.stride(), first.dtype):
            raise ValueError(f"layer {layer} has a cache of another form than layer 0")
    if first.stride(-1) != 1 or first.itemsize not in INTEGERS:
        raise ValueError(f"a cache of {first.dtype} and strides {first.stride()} cannot be addressed")
    pointers = np.array([cache.data_ptr() for cache in caches], np.int64)
    if (pointers % ALIGNMENT).any():
        raise ValueError(f"a layer's cache does not begin at a multiple of {ALIGNMENT} bytes")
    return pointers


def _whole(staging: torch.Tensor) -> torch.Tensor:
    """Return staging up to its last whole word of `ALIGNMENT` bytes. ValueError if it is not aligned."""
    if staging.dtype != torch.uint8 or staging.data_ptr() % ALIGNMENT:
        raise ValueError(f"staging is {staging.dtype} at {staging.data_ptr()}, not aligned bytes")
    return staging[: len(staging) // ALIGNMENT * ALIGNMENT]


def _elements(staging: torch.Tensor, caches: Sequence[torch.Tensor]) -> torch.Tensor:
    return _whole(staging).view(INTEGERS[caches[0].itemsize])


def form_of(caches: Sequence[torch.Tensor]) -> dict[str, int]:
    """Return the arguments of both kernels that are the same for every batch."""
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
