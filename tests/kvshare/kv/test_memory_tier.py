"""The in-memory tier: counts its bytes, never overwrites, treats corruption as a miss."""

import pytest
import torch

from delta_tree import SegmentId
from kvshare.kv.sequence import SegmentKV
from kvshare.kv.tier import MemoryTier


def segment(tokens: int = 4, dtype: torch.dtype = torch.float32) -> SegmentKV:
    k, v = (torch.randn(2, tokens, 3, 8).to(dtype) for _ in range(2))
    return SegmentKV((k, v))


def test_bytes_are_counted_in_and_out() -> None:
    """What went in comes out; unknown ids are ignored."""
    tier = MemoryTier(10**6)
    first, second = segment(4), segment(6)
    tier.put(SegmentId(1), first, first.checksum())
    tier.put(SegmentId(2), second, second.checksum())
    assert tier.num_bytes == first.num_bytes + second.num_bytes
    assert tier.drop([SegmentId(1), SegmentId(9), SegmentId(1)]) == [SegmentId(1)]
    assert tier.num_bytes == second.num_bytes
    assert SegmentId(1) not in tier
    assert len(tier) == 1


def test_a_segment_is_never_overwritten() -> None:
    """Ids are unique; a second put under the same id is a bug and says so."""
    tier, kv = MemoryTier(10**6), segment()
    tier.put(SegmentId(1), kv, kv.checksum())
    with pytest.raises(ValueError, match="already held"):
        tier.put(SegmentId(1), segment(), 0)
    assert tier.fetch([SegmentId(1)]).segments == {SegmentId(1): kv}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_flipped_value_is_a_miss(dtype: torch.dtype) -> None:
    """The checksum covers every byte of K and V, in both dtypes."""
    tier = MemoryTier(10**6)
    for number, name in enumerate(("k", "v")):
        kv = segment(dtype=dtype)
        tier.put(SegmentId(number), kv, kv.checksum())
        assert tier.fetch([SegmentId(number)]).segments == {SegmentId(number): kv}
        getattr(kv, name)[1, 3, 2, 7] += 1
        assert tier.fetch([SegmentId(number)]).missing == {SegmentId(number)}
        tier.drop([SegmentId(number)])
    assert tier.num_bytes == 0
