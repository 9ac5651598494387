"""Extents are allocated and freed in any order: none overlap, and what is free comes together again."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshare.kv.arena import Arena, Extent

SIZE = 64 * 1024


def new_arena() -> Arena:
    import torch

    return Arena(torch.zeros(SIZE, dtype=torch.uint8))


@given(st.lists(st.one_of(st.integers(1, 20_000), st.none()), max_size=60), st.randoms(use_true_random=False))
def test_whatever_is_allocated_and_freed(actions: list[int | None], random: Random) -> None:
    """A number allocates so many bytes, None frees one of the extents."""
    arena, taken = new_arena(), list[Extent]()
    for num_bytes in actions:
        if num_bytes is None:
            if taken:
                arena.free(taken.pop(random.randrange(len(taken))))
        elif (extent := arena.allocate(num_bytes)) is not None:
            assert num_bytes <= len(extent) < num_bytes + 512
            assert all(extent.end <= other.start or other.end <= extent.start for other in taken)
            assert 0 <= extent.start < extent.end <= SIZE
            taken.append(extent)
    for extent in taken:
        arena.free(extent)
    assert arena.allocate(SIZE) == Extent(0, SIZE)


def test_the_smallest_that_is_large_enough_is_taken() -> None:
    """So that a large extent stays for what is large."""
    arena = new_arena()
    holes = [arena.allocate(size) for size in (4096, 512, 8192, 512)]
    for hole in holes[::2]:
        assert hole is not None
        arena.free(hole)
    assert arena.allocate(3000) == Extent(0, 3072)


def test_there_is_no_room_in_one_piece() -> None:
    arena = new_arena()
    parts = [arena.allocate(SIZE // 4) for _ in range(4)]
    assert arena.allocate(1) is None
    for part in parts[::2]:
        assert part is not None
        arena.free(part)
    assert arena.allocate(SIZE // 2) is None
    assert arena.allocate(SIZE // 4) is not None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_view_has_the_extents_bytes(dtype: str) -> None:
    import torch

    arena = new_arena()
    first, second = arena.allocate(24), arena.allocate(24)
    assert first is not None
    assert second is not None
    rows = arena.view(second, (2, 3), getattr(torch, dtype))
    rows.fill_(1.0)
    assert rows.is_contiguous()
    assert arena.buffer[second.start : second.start + rows.nbytes].any()


def test_clear_frees_everything() -> None:
    arena = new_arena()
    arena.allocate(SIZE)
    arena.clear()
    assert arena.allocate(SIZE) == Extent(0, SIZE)
