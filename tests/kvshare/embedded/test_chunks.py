"""How long a chunk of a prefill is: whoever comes next waits for the one that is computed then."""

from __future__ import annotations

import pytest

from kvshare.embedded.chunks import PrefillChunks


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def millisecond_each(num_tokens: int) -> float:
    return num_tokens / 1000


def test_a_tenant_alone_gets_whole_chunks_or_a_quarter() -> None:
    """The latter while others decode."""
    chunks = PrefillChunks(512, clock=Clock())
    found = [chunks.next("a", others_decode=each, seconds=millisecond_each) for each in (False, True, False)]
    assert found == [512, 128, 512]


@pytest.mark.parametrize(("whole", "expected"), [(1024, 64), (512, 32), (128, 8), (16, 8), (1, 1)])
def test_two_tenants_get_short_chunks(whole: int, expected: int) -> None:
    """Some fifteen milliseconds, but at least a sixteenth; both, from the second one's first chunk on."""
    chunks = PrefillChunks(whole, clock=Clock())
    found = [chunks.next(tenant, others_decode=False, seconds=millisecond_each) for tenant in "abab"]
    assert found == [whole, *[expected] * 3]


def test_where_chunks_are_quick_they_stay_whole() -> None:
    """As on a GPU, where short ones would only take longer."""
    chunks = PrefillChunks(512, clock=Clock())
    assert [chunks.next(tenant, others_decode=False, seconds=lambda _: 0.01) for tenant in "aba"] == [512] * 3


def test_a_tenant_that_stays_away_is_not_waited_for() -> None:
    """Some seconds after its last chunk."""
    clock = Clock()
    chunks, found = PrefillChunks(512, clock=clock), []
    for clock.now, tenant in ((0.0, "a"), (1.0, "b"), (4.0, "b"), (9.0, "b"), (9.1, "a")):
        found.append(chunks.next(tenant, others_decode=False, seconds=millisecond_each))
    assert found == [512, 32, 32, 512, 32]
