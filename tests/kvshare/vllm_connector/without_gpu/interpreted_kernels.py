"""
What the fixture `own_kernels` starts: our kernels in Triton's interpreter, compared with plain indexing. Each
line of stdin is a `Case` and a fault, and for each there is one on stdout with the number of wrong elements.

A process of its own, with TRITON_INTERPRET=1: Triton looks at it once, when imported.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from delta_tree import Span
from kvshare.kv.movement import STAYS
from kvshare.vllm_connector.worker import block_kernels, kernels
from kvshare.vllm_connector.worker.kernel_tables import MovementTable, SlotTable, StagedCopy, StagedPart
from tests.kvshare.vllm_connector.without_gpu.kernel_case import CPU, Batch, Case

WORDS = {0: torch.int64, 4: torch.int32, 2: torch.int16, 6: torch.int16}  # by what 8 bytes leave over
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
Fault = Callable[[StagedCopy], StagedCopy]

_truncate, _convert = InterpreterBuilder.create_fp_trunc, InterpreterBuilder.create_fp_to_fp
_OF_EIGHT_BITS = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}


def _rounded(builder: Any, number: TensorHandle, dtype: Any) -> TensorHandle:
    """Triton 3.7's interpreter cuts the bits off that a bfloat16 has not; a GPU rounds to the nearest."""
    if dtype.scalar != tl.bfloat16:
        return _truncate(builder, number, dtype)
    rounded = torch.from_numpy(np.array(number.data, np.float32)).bfloat16()
    return TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)


def _converted(builder: Any, number: TensorHandle, dtype: Any, mode: Any) -> TensorHandle:
    """Its conversions to 8 bits are wrong for numbers near zero and halfway between two; a GPU's are not."""
    if dtype.scalar not in _OF_EIGHT_BITS:
        return _convert(builder, number, dtype, mode)
    rounded = torch.from_numpy(np.array(number.data, np.float32)).to(_OF_EIGHT_BITS[dtype.scalar])
    return TensorHandle(rounded.view(torch.uint8).numpy(), dtype.scalar)


def try_out(case: Case, fault: Fault) -> dict[str, int]:
    batch = Batch(case)
    return {
        "gathered": _gathered(batch, fault),
        "scattered": _scattered(batch, fault),
        "copied": _copied(batch, fault),
        "sums": _summed(batch, flips=fault is not FAULTS["nothing"]),
    }


def _gathered(batch: Batch, fault: Fault) -> int:
    caches, copies = batch.caches(), [copy for copy in batch.copies if _is_first(batch, copy)]
    want = batch.room()
    found = want.clone()
    for copy in copies:
        for number, rows in _pieces(batch, copy.part, want):
            layer, places = _places(batch, number, copy)
            k, v = caches[layer][places].chunk(2, dim=-1)
            rows[:, copy.source.start : copy.source.end] = torch.stack((k, v))
    kernels.gather(caches, found, [fault(copy) for copy in copies])
    return int((want != found).sum())


def _is_first(batch: Batch, copy: StagedCopy) -> bool:
    """Of its part: two copies of the same tokens would be written to the same place."""
    return next(other for other in batch.copies if other.part == copy.part) is copy


def _scattered(batch: Batch, fault: Fault) -> int:
    caches, staging, layout = batch.caches(), _staged(batch), batch.case.layout()
    want = [cache.clone() for cache in caches]
    for copy in batch.copies:
        for number, rows in _pieces(batch, copy.part, staging):
            layer, places = _places(batch, number, copy)
            source = rows[:, copy.source.start : copy.source.end]
            moves = (plane.movements[layer] or STAYS for plane in layout.planes)
            moved = [move.moved(part, copy.shift) for part, move in zip(source, moves, strict=True)]
            want[layer][places] = torch.cat(moved, dim=-1)
    kernels.scatter(
        caches, staging, [fault(copy) for copy in batch.copies], MovementTable(layout.planes, CPU)
    )
    bits = BITS[batch.case.torch_dtype.itemsize]
    return sum(int((a.view(bits) != b.view(bits)).sum()) for a, b in zip(want, caches, strict=True))


def _copied(batch: Batch, fault: Fault) -> int:
    """From other slots to those of the copies, in all pieces."""
    caches, layout, sources = batch.caches(), batch.case.layout(), batch.other_slots()
    for copy, source in zip(batch.copies, sources, strict=True):
        for number in range(batch.case.num_pieces if copy.shift else 0):  # only numbers can be rotated
            layer, here = _places(batch, number, replace(copy, slots=source))
            caches[layer][here] = batch.numbers(caches[layer][here].shape)
    want = [cache.clone() for cache in caches]
    whole = StagedPart(0, 0, 0, batch.case.num_pieces)
    for copy, source in zip(batch.copies, sources, strict=True):
        for number in range(batch.case.num_pieces):
            layer, there = _places(batch, number, copy)
            _, here = _places(batch, number, replace(copy, slots=source))
            moves = (plane.movements[layer] or STAYS for plane in layout.planes)
            rows = caches[layer][here].chunk(2, dim=-1)
            moved = [move.moved(part, copy.shift) for part, move in zip(rows, moves, strict=True)]
            want[layer][there] = torch.cat(moved, dim=-1)
    wrong = [fault(replace(copy, part=whole)) for copy in batch.copies]
    table = SlotTable.of(
        [(source, copy.slots, copy.shift) for copy, source in zip(wrong, sources, strict=True)]
    )
    block_kernels.copy_rows(caches, table, MovementTable(layout.planes, CPU))
    bits = BITS[batch.case.torch_dtype.itemsize]
    return sum(int((a.view(bits) != b.view(bits)).sum()) for a, b in zip(want, caches, strict=True))


def _summed(batch: Batch, *, flips: bool) -> int:
    """`flips`: a single bit of staging."""
    staging, case = _staged(batch), batch.case
    want = []
    for part in batch.parts:
        for _, rows in _pieces(batch, part, staging):
            words = rows.reshape(-1).view(WORDS[2 * case.dim * case.torch_dtype.itemsize % 8]).tolist()
            want.append((sum(words) + (1 << 63)) % (1 << 64) - (1 << 63))
    if flips:
        staging[batch.parts[-1].offset + 1] ^= 64
    found = kernels.sums(staging, batch.parts, dim=case.dim, itemsize=case.torch_dtype.itemsize)
    return sum(a != b for a, b in zip(want, found.tolist(), strict=True))


def _places(batch: Batch, number: int, copy: StagedCopy) -> tuple[int, tuple[Any, ...]]:
    """A piece's layer, and its tokens in that layer's cache."""
    head, layer = divmod(number, batch.case.num_layers)
    block, inside = np.divmod(copy.slots, batch.case.block_size)
    return layer, (torch.from_numpy(block), head, torch.from_numpy(inside))


def _staged(batch: Batch) -> torch.Tensor:
    staging = batch.room()
    for part, segment in zip(batch.parts, batch.segments, strict=True):
        for number, rows in _pieces(batch, part, staging):
            head, layer = divmod(number, batch.case.num_layers)
            rows[:] = segment[head, layer]
    return staging


def _pieces(batch: Batch, part: StagedPart, staging: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """The number of each piece of a part, and its rows (2, T, D) in staging."""
    dtype = batch.case.torch_dtype
    num_bytes = 2 * part.num_tokens * batch.case.dim * dtype.itemsize
    for index in range(part.num_pieces):
        start = part.offset + index * num_bytes
        rows = staging[start : start + num_bytes].view(dtype)
        head, layer = divmod(index, part.of_head or part.num_pieces)
        number = part.first_piece + head * batch.case.num_layers + layer
        yield number, rows.view(2, part.num_tokens, batch.case.dim)


def _next_piece(part: StagedPart, further: int) -> StagedPart:
    """Its pieces are taken for those so much further, as far as there are any."""
    return replace(part, first_piece=part.first_piece + further, num_pieces=part.num_pieces - further)


def _a_token_earlier(copy: StagedCopy) -> StagedCopy:
    start, end = copy.source.start, copy.source.end
    return replace(copy, source=Span(start - 1, end - 1)) if start else copy


FAULTS: dict[str, Fault] = {
    "nothing": lambda copy: copy,
    "slots exchanged": lambda copy: replace(copy, slots=copy.slots[::-1].copy()),
    "the next layer": lambda copy: replace(copy, part=_next_piece(copy.part, 1)),
    "the next head": lambda copy: replace(copy, part=_next_piece(copy.part, 2)),
    "a piece less": lambda copy: replace(copy, part=replace(copy.part, num_pieces=copy.part.num_pieces - 1)),
    "a token earlier": _a_token_earlier,
    "a position further": lambda copy: replace(copy, shift=copy.shift + 1),
}
"""What is wrong in what the kernels read."""


def prepare() -> None:
    """Triton's interpreter rounds as a GPU does."""
    InterpreterBuilder.create_fp_trunc, InterpreterBuilder.create_fp_to_fp = _rounded, _converted


def main() -> None:
    prepare()
    for line in sys.stdin:
        asked = json.loads(line)
        fault = FAULTS[asked.pop("fault", "nothing")]
        try:
            answer: dict[str, Any] = dict(try_out(Case(**asked), fault))
        except Exception:  # noqa: BLE001  the test that asked fails with it
            answer = {"error": traceback.format_exc()}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
