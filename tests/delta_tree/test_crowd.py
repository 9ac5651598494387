"""Candidates' k-grams side by side are what each would say alone."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from delta_tree.crowd import Crowd
from delta_tree.runs import Sieve, kgram_hashes

prompts = st.lists(st.lists(st.integers(0, 2), max_size=20), max_size=5)


def ids(values: list[int]) -> Any:
    return np.array(values, dtype=np.int32)


@given(prompts, st.lists(st.integers(0, 2), max_size=20), st.integers(1, 6))
def test_a_crowd_answers_like_each_prompt_alone(stored: list[list[int]], target: list[int], k: int) -> None:
    """Hashes and passing places are those of the prompt alone; no k-gram reaches into the next prompt."""
    crowd = Crowd([ids(values) for values in stored], k)
    sieve = Sieve(kgram_hashes(ids(target), k))
    passing = crowd.passing(sieve)
    assert len(passing) == len(stored)
    for number, values in enumerate(stored):
        alone = kgram_hashes(ids(values), k)
        assert crowd.hashes(number).tolist() == alone.tolist()
        assert passing[number].tolist() == sieve.passing(alone).tolist()


def test_nobody_is_a_crowd_too() -> None:
    """Without candidates there is nothing to pass."""
    assert Crowd((), 16).passing(Sieve(kgram_hashes(ids([1] * 20), 16))) == []
