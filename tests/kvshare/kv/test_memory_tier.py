"""The in-memory tier: counts its bytes, never overwrites, treats corruption as a miss."""

import pytest
import torch

from delta_tree import Segment, SegmentId, Span
from kvshare.kv.layout import KVLayout
from kvshare.kv.sequence import SegmentKV, SequenceKV
from kvshare.kv.tier import MemoryTier


def segment(tokens: int = 4, dtype: torch.dtype = torch.float32) -> SegmentKV:
    k, v = (torch.randn(2, tokens, 3, 8).to(dtype) for _ in range(2))
    return SegmentKV((k, v))


def put(tier: MemoryTier, number: int, kv: SegmentKV) -> None:
    tier.put(Segment(SegmentId(number), "ns", 0, kv.num_tokens, 0, kv.num_bytes, kv.checksum()), kv)


def test_bytes_are_counted_in_and_out() -> None:
    """What went in comes out; unknown ids are ignored."""
    tier = MemoryTier(10**6)
    first, second = segment(4), segment(6)
    put(tier, 1, first)
    put(tier, 2, second)
    assert tier.num_bytes == first.num_bytes + second.num_bytes
    assert tier.drop([SegmentId(1), SegmentId(9), SegmentId(1)]) == [SegmentId(1)]
    assert tier.num_bytes == second.num_bytes
    assert SegmentId(1) not in tier
    assert len(tier) == 1


def test_a_segment_is_never_overwritten() -> None:
    """Ids are unique; a second put under the same id is a bug and says so."""
    tier, kv = MemoryTier(10**6), segment()
    put(tier, 1, kv)
    with pytest.raises(ValueError, match="already held"):
        put(tier, 1, segment())
    assert tier.fetch([SegmentId(1)]).segments == {SegmentId(1): kv}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_flipped_value_is_a_miss(dtype: torch.dtype) -> None:
    """The checksum covers every byte of K and V, in both dtypes."""
    tier = MemoryTier(10**6)
    for number, name in enumerate(("k", "v")):
        kv = segment(dtype=dtype)
        put(tier, number, kv)
        assert tier.fetch([SegmentId(number)]).segments == {SegmentId(number): kv}
        getattr(kv, name)[1, 3, 2, 7] += 1
        assert tier.fetch([SegmentId(number)]).missing == {SegmentId(number)}
        tier.drop([SegmentId(number)])
    assert tier.num_bytes == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_cut_has_the_checksum_of_its_bytes(dtype: torch.dtype) -> None:
    """It was made while the rows were copied; layers of two shapes, and rows of no whole number of words."""
    shapes = [((2, 5), (2, 5)), ((1, 3), (2, 7)), ((2, 5), (2, 5))]
    layout = KVLayout.of_shapes(shapes, dtype=dtype, device=torch.device("cpu"))
    sequence = SequenceKV(layout, 40)
    for plane in sequence.planes:
        plane.copy_(torch.randn(plane.shape))
    cut = sequence.cut(Span(3, 34))
    assert cut.checksum() == cut.computed_checksum()
    assert cut.checksum() != sequence.cut(Span(4, 35)).checksum()
    assert all(torch.equal(own, rows[:, 3:34]) for own, rows in zip(cut.planes, sequence.planes, strict=True))


def test_a_flipped_bit_in_any_byte_is_a_miss() -> None:
    """In each byte of all layers another bit."""
    tier = MemoryTier(10**6)
    sequence = SequenceKV(KVLayout.uniform(2, 2, 3, dtype=torch.bfloat16, device=torch.device("cpu")), 8)
    for plane in sequence.planes:
        plane.copy_(torch.randn(plane.shape))
    kv = sequence.cut(Span(1, 6))
    put(tier, 1, kv)
    for plane in kv.planes:
        raw = plane.flatten().view(torch.uint8)
        for place in range(len(raw)):
            raw[place] ^= 1 << place % 8
            assert tier.fetch([SegmentId(1)]).missing == {SegmentId(1)}
            raw[place] ^= 1 << place % 8
    assert tier.fetch([SegmentId(1)]).segments == {SegmentId(1): kv}


def test_it_says_what_it_holds_and_how_often_it_was_asked_in_vain() -> None:
    """A segment that was asked for twice in one fetch counts once; a damaged one is a miss."""
    tier, kv = MemoryTier(10**6), segment()
    put(tier, 1, kv)
    tier.fetch([SegmentId(1), SegmentId(1), SegmentId(2)])
    kv.v[0, 0, 0, 0] += 1
    tier.fetch([SegmentId(1)])
    (status,) = tier.status()
    assert (status.num_segments, status.num_bytes, status.max_bytes) == (1, kv.num_bytes, 10**6)
    assert (status.num_hits, status.num_misses) == (1, 2)
    tier.close()  # does not lose what a request may still read
    assert SegmentId(1) in tier
