"""
The layout of K and V inside a block of vLLM's KV cache, (H, N, 2 D) with any strides.

It is determined by writing random rows through vLLM: the right layout reads them back.

    content     [..., :D] is K, [..., D:] is V                   FlashAttention, Triton, FlashInfer
    transposed  per head N*D elements of K as (D, N), then V     CPU, vector kernels
    learned     any other permutation inside a block             CPU, for example AMX

Alphabet: B blocks, N tokens per block, H kv heads of this rank, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from delta_tree import Span
from kvshare.vllm_connector.worker.cache_dtype import has_same_bits, random_rows

WriteRows = Callable[[torch.Tensor, torch.Tensor], None]  # k, v (N, H, D) into the probed block
ReadRows = Callable[[torch.Tensor], torch.Tensor]

_WIDER = {1: torch.int16, 2: torch.int32, 4: torch.int64}  # two elements as one number, by the bytes of one
ADDRESSABLE = "content"  # the layout that our kernels read and write, with any strides


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """
    Reads K and V from contiguous copies of blocks, by one function each. `reads_views`: it reads blocks with
    any strides, and returns views of them.

    Shapes:  blocks (B, H, N, 2 D) -> (B, N, H, D), views or copies
    """

    name: str
    planes: tuple[ReadRows, ReadRows]
    reads_views: bool = False


def _content(blocks: torch.Tensor, plane: int) -> torch.Tensor:
    return blocks.chunk(2, dim=-1)[plane].permute(0, 2, 1, 3)


def _transposed(blocks: torch.Tensor, plane: int) -> torch.Tensor:
    num_blocks, num_heads, num_tokens, width = blocks.shape
    rows = blocks.view(num_blocks, num_heads, 2, num_tokens * width // 2)[:, :, plane]
    if plane == 0:
        return rows.view(num_blocks, num_heads, width // 2, num_tokens).permute(0, 3, 1, 2)
    return rows.view(num_blocks, num_heads, num_tokens, width // 2).permute(0, 2, 1, 3)


_KNOWN = tuple(
    BlockLayout(name, (partial(read, plane=0), partial(read, plane=1)), reads_views=read is _content)
    for name, read in ((ADDRESSABLE, _content), ("transposed", _transposed))
)


def find_layout(block: torch.Tensor, write: WriteRows) -> BlockLayout | None:
    """
    Return the layout that reads back what `write` writes into `block`, or None. The block is overwritten.

    Shapes:  block (H, N, 2 D), a view into the cache
    """
    num_heads, num_tokens, width = block.shape
    shape = (num_tokens, num_heads, width // 2)
    for layout in _KNOWN:
        if _reads_back(layout, block, write, shape):
            return layout
    learned = _learn(block, write, shape)
    return learned if learned is not None and _reads_back(learned, block, write, shape) else None


def _reads_back(
    layout: BlockLayout, block: torch.Tensor, write: WriteRows, shape: tuple[int, int, int]
) -> bool:
    generator = torch.Generator().manual_seed(0)
    k, v = (random_rows(shape, generator, block.dtype).to(block.device) for _ in range(2))
    write(k, v)
    read = block.contiguous().unsqueeze(0)
    read_back = [rows(read)[0] for rows in layout.planes]
    return all(map(has_same_bits, read_back, (k, v)))


def _learn(block: torch.Tensor, write: WriteRows, shape: tuple[int, int, int]) -> BlockLayout | None:
    """Write every element's number bit by bit, and look where the bits appear."""
    count = shape[0] * shape[1] * shape[2]
    numbers = torch.arange(count, device=block.device).view(shape)
    places = []
    for is_key in (True, False):
        number_there = torch.zeros(block.numel(), dtype=torch.int64, device=block.device)
        for bit in range(count.bit_length()):
            number_there += _landed((numbers >> bit) & 1, block, write, is_key=is_key).long() << bit
        where = _landed(torch.ones_like(numbers), block, write, is_key=is_key).nonzero().flatten()
        place = torch.full((count,), -1, dtype=torch.int64, device=block.device)
        place[number_there[where].clamp(max=count - 1)] = where
        if len(where) != count or int(place.min()) < 0:
            return None  # not a permutation: some elements are changed or not stored
        places.append(place.view(shape))
    k, v = (_nested(place) or _gathered(place) for place in places)
    return BlockLayout("learned", (k, v))


def _nested(places: torch.Tensor) -> ReadRows | None:
    """
    Return a function that reads elements whose places are sums of steps, or None if they are not.

    Tiles of matrix units are of this kind: AMX has K as tiles of 16 tokens and pairs of dimensions. Reading
    them by strides takes a CPU two thirds of the time of reading element by element.
    Shapes:  places (N, H, D)
    """
    first = int(places[0, 0, 0])
    lines = places[:, 0, 0], places[0, :, 0], places[0, 0, :]
    together = lines[0][:, None, None] + lines[1][:, None] + lines[2] - 2 * first
    steps = [_steps((line - first).tolist()) for line in lines]
    if not torch.equal(together, places) or None in steps:
        return None
    in_tokens, in_heads, in_dims = (own or [] for own in steps)
    others = (first, *(step for _, step in (*in_tokens, *in_heads, *in_dims[:-1])))
    has_pairs = in_dims[-1:] == [(2, 1)] and not any(place % 2 for place in others)

    def rows(blocks: torch.Tensor) -> torch.Tensor:
        elements, dims, unit = blocks.flatten(start_dim=1), in_dims, 1
        if wide := _WIDER.get(blocks.itemsize) if has_pairs else None:
            elements, dims, unit = elements.view(wide), in_dims[:-1], 2
        shape = [(count, step // unit) for count, step in (*in_tokens, *in_heads, *dims)]
        sizes, strides = zip((len(blocks), elements.stride(0)), *shape, strict=True)
        read = elements.as_strided(sizes, strides, elements.storage_offset() + first // unit)
        return read.reshape(len(blocks), *places.shape[:2], -1).contiguous().view(blocks.dtype)

    return rows


def _steps(line: Sequence[int]) -> list[tuple[int, int]] | None:
    """
    Return numbers from 0 on as nested loops, (count, step) from the outermost on; None if they are not.

    0 2 4 100 102 104 is two steps of 100, each of three steps of 2.
    """
    steps: list[tuple[int, int]] = []
    so_far = [0]
    while (inner := len(so_far)) < len(line):
        step, count = line[inner], 1
        while count * inner < len(line) and line[count * inner] == count * step:
            count += 1
        if step <= 0:  # torch has no views with negative strides
            return None
        steps.insert(0, (count, step))
        so_far = [number * step + place for number in range(count) for place in so_far]
    return steps if so_far == [*line] else None


def _gathered(places: torch.Tensor) -> ReadRows:
    """Return a function that reads each element from its place in a flattened block. Shapes:  (N, H, D)"""
    flat = places.flatten()

    def rows(blocks: torch.Tensor) -> torch.Tensor:
        if blocks.device.type == "cpu":  # block by block takes a third of the time there
            elements = torch.stack([block.flatten().index_select(0, flat) for block in blocks])
        else:
            elements = blocks.flatten(start_dim=1).index_select(1, flat)
        return elements.view(-1, *places.shape)

    return rows


def _landed(marks: torch.Tensor, block: torch.Tensor, write: WriteRows, *, is_key: bool) -> torch.Tensor:
    """Return which elements of the flattened block are set after writing `marks`."""
    block.zero_()
    rows = marks.to(block.dtype)
    zeros = torch.zeros_like(rows)
    write(rows, zeros) if is_key else write(zeros, rows)
    return block.contiguous().flatten() != 0


def by_block(span: Span, size: int) -> Iterator[tuple[slice, slice]]:
    """
    Yield the blocks of a span in order, each with a slice of its tokens; neighbouring whole blocks as one.

    So rows of whole blocks are copied at once from where they lie; to put them in one row first would copy
    them twice.
    """
    start = span.start
    while start < span.end:
        block, token = divmod(start, size)
        num_whole = (span.end - start) // size if token == 0 else 0
        blocks = slice(block, block + max(num_whole, 1))
        end = min(blocks.stop * size, span.end)
        yield blocks, slice(token, end - (blocks.stop - 1) * size)
        start = end
