"""Filtering all candidates together gives what filtering each alone gives."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_tree import TokenIds
from delta_tree import kgrams as module
from delta_tree.kgrams import CandidateKGrams, Sieve, hashes_of_all, quick_hashes

prompts = st.lists(st.lists(st.integers(0, 2), max_size=20), max_size=5)


def ids(values: list[int]) -> TokenIds:
    return np.array(values, dtype=np.int32)


@pytest.mark.parametrize(("at_once", "long"), [(1, 2**13), (2, 2**13), (2**16, 2**13), (2, 1)])
@given(prompts, st.lists(st.integers(0, 2), max_size=20), st.integers(1, 6))
def test_filtering_together_equals_filtering_each_alone(
    at_once: int, long: int, stored: list[list[int]], target: list[int], k: int
) -> None:
    """Hashes and passing places are those of the prompt alone; no k-gram reaches into the next prompt."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_SIEVED_AT_ONCE", at_once)
        patch.setattr(module, "_LONG", long)  # long candidates are not joined
        check_candidates(stored, target, k)


def check_candidates(stored: list[list[int]], target: list[int], k: int) -> None:
    hashes = hashes_of_all([ids(values) for values in stored], k)
    kgrams = CandidateKGrams(hashes)
    sieve = Sieve(quick_hashes(ids(target), k))
    passing = kgrams.narrow(sieve)
    assert len(passing) == len(stored)
    for number, values in enumerate(stored):
        alone = quick_hashes(ids(values), k)
        assert hashes[number].tolist() == alone.tolist()
        assert passing[number].tolist() == sieve.passing(alone).tolist()
    again = CandidateKGrams(hashes, passing).narrow(sieve)
    assert [places.tolist() for places in again] == [places.tolist() for places in passing]
    nothing = kgrams.narrow(Sieve(quick_hashes(ids([]), k)))
    assert [len(places) for places in nothing] == [0] * len(stored)
    assert [len(places) for places in kgrams.narrow(sieve)] == [0] * len(stored)  # what is out stays out


def test_without_candidates_nothing_passes() -> None:
    """No candidates give no positions."""
    assert CandidateKGrams(()).narrow(Sieve(quick_hashes(ids([1] * 20), 16))) == []
