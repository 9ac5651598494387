"""Where fingerprints stand among sorted ones."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vector_index.nominator import _PlaceTable

_PRINT = st.integers(0, 2**32 - 1) | st.integers(0, 40).map(lambda high: high << 20)


@given(st.lists(_PRINT, min_size=1, unique=True), st.lists(_PRINT, unique=True))
def test_places_are_those_of_a_search(prints: list[int], others: list[int]) -> None:
    """Also where many have one slot."""
    own = np.sort(np.array(prints, dtype=np.uint32))
    held = np.sort(np.array(prints[::2] + [each for each in others if each not in prints], dtype=np.uint32))
    found = np.sort(_PlaceTable(own).of(held)).tolist()
    assert found == np.flatnonzero(np.isin(own, held)).tolist()
