"""Candidates' k-grams side by side are what each would say alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_tree import TokenIds
from delta_tree import crowd as crowd_module
from delta_tree.crowd import Crowd
from delta_tree.kgrams import Sieve, quick_hashes

prompts = st.lists(st.lists(st.integers(0, 2), max_size=20), max_size=5)


def ids(values: list[int]) -> TokenIds:
    return np.array(values, dtype=np.int32)


@pytest.mark.parametrize("max_together", [0, 2**16])
@given(prompts, st.lists(st.integers(0, 2), max_size=20), st.integers(1, 6))
def test_a_crowd_answers_like_each_prompt_alone(
    max_together: int, stored: list[list[int]], target: list[int], k: int
) -> None:
    """Hashes and passing places are those of the prompt alone; no k-gram reaches into the next prompt."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crowd_module, "_MAX_TOGETHER", max_together)
        check_crowd(stored, target, k)


def check_crowd(stored: list[list[int]], target: list[int], k: int) -> None:
    crowd = Crowd([ids(values) for values in stored], k)
    sieve = Sieve(quick_hashes(ids(target), k))
    passing = crowd.narrow(sieve)
    assert len(passing) == len(stored)
    for number, values in enumerate(stored):
        alone = quick_hashes(ids(values), k)
        assert crowd.hashes(number).tolist() == alone.tolist()
        assert passing[number].tolist() == sieve.passing(alone).tolist()
    nothing = crowd.narrow(Sieve(quick_hashes(ids([]), k)))
    assert [len(places) for places in nothing] == [0] * len(stored)
    assert [len(places) for places in crowd.narrow(sieve)] == [0] * len(stored)  # what is out stays out


def test_nobody_is_a_crowd_too() -> None:
    """Without candidates there is nothing to pass."""
    assert Crowd((), 16).narrow(Sieve(quick_hashes(ids([1] * 20), 16))) == []
