"""Sums of KV: a flipped bit changes them, wherever it is, and all ways to compute them agree."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch

DTYPES = ["float32", "bfloat16", "float16", "float8_e4m3fn", "uint8", "int8", "float64"]
SHAPES = [(3, 4), (1, 1), (5, 3), (2, 7), (7, 1)]  # tokens and dimensions


def random_bytes(dtype: str, *shape: int) -> torch.Tensor:
    import torch

    own = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(0)
    *outer, last = shape
    found = torch.randint(0, 256, (*outer, last * own.itemsize), generator=generator, dtype=torch.uint8)
    return found.view(own)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_flipped_bit_changes_the_sum_of_its_piece_only(dtype: str, shape: tuple[int, int]) -> None:
    """Two heads of two layers, keys and values of a few tokens, of any dtype and size."""
    import torch

    from kvshare.kv.sums import combined, sums

    num_tokens, dim = shape
    rows = random_bytes(dtype, 2, 2, 2, num_tokens, dim)
    row_bytes = 2 * dim * rows.itemsize
    right = sums(rows.flatten(2), row_bytes=row_bytes)
    assert right.shape == (2, 2)
    raw = rows.flatten().view(torch.uint8)
    flips = torch.eye(len(raw), dtype=torch.uint8)[:, None] << torch.arange(8, dtype=torch.uint8)[:, None]
    flipped = (raw ^ flips.flatten(0, 1)).view(-1, 2, 2, len(raw) // 4).view(rows.dtype)  # one bit in each
    found = sums(flipped, row_bytes=row_bytes)
    piece_of_flip = torch.arange(4).repeat_interleave(len(found) // 4).view(-1, 1)
    assert torch.equal((found != right).flatten(1), torch.arange(4) == piece_of_flip)
    assert combined(right) not in set(map(combined, found))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (1, 700, 3, 31), (3, 1, 1, 1), (2, 0, 1, 1), (0, 3, 1, 1)])
def test_a_copy_has_the_sums_of_what_it_copies(dtype: str, shape: tuple[int, ...]) -> None:
    """Whatever strides the source has, and however many chunks there are."""
    import torch

    from kvshare.kv import sums

    source = random_bytes(dtype, *shape).transpose(1, 2).contiguous().transpose(1, 2)
    target = torch.empty(shape, dtype=source.dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sums, "_CHUNK_BYTES", 1000)
        found = sums.copy_and_sum(target, source)
    assert torch.equal(target.flatten().view(torch.uint8), source.flatten().view(torch.uint8))
    row_bytes = shape[2] * shape[3] * source.itemsize
    assert torch.equal(found, sums.sums(target.flatten(1), row_bytes=row_bytes))


def test_the_sum_is_that_of_signed_words_modulo_2_to_the_64() -> None:
    """Written out, as a kernel has to compute it."""
    import torch

    from kvshare.kv.sums import sums

    words = torch.tensor([[2**63 - 1, 2, -5]])
    assert sums(words, row_bytes=8).tolist() == [2**63 - 4]
    assert sums(words[:, :2], row_bytes=8).tolist() == [-(2**63) + 1]
    narrow = torch.tensor([[-1, 5, 7]], dtype=torch.int32)
    assert sums(narrow, row_bytes=12).tolist() == [11]
    assert sums(narrow.view(torch.int16), row_bytes=6).tolist() == [-1 - 1 + 5 + 7]


def test_the_order_of_pieces_counts_in_the_whole() -> None:
    """Layers that changed places are noticed, too."""
    import torch

    from kvshare.kv.sums import combined

    assert combined(torch.tensor([1, 2])) != combined(torch.tensor([2, 1]))
    assert 0 <= combined(torch.tensor([-1, -(2**63)])) < 2**64
