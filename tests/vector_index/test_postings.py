"""Fingerprints in memory find what a dictionary finds, through merges, forgetting and compacting."""

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from vector_index import Entry, Hit
from vector_index.postings import Postings

ALL = range(24)  # fingerprints


def prints(*values: int) -> NDArray[np.uint32]:
    return np.array(values, dtype=np.uint32)


@pytest.fixture(autouse=True, scope="module")
def _small_arrays() -> Iterator[None]:
    """Arrays are merged after a few prompts, not after thousands."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vector_index.postings._YOUNG", 8)
        yield


def test_of_equals_the_last_added_comes_first() -> None:
    """The newest prompt is the most likely one to be asked for again."""
    postings = Postings()
    postings.add([Entry(number, "a", prints(1, 2)) for number in range(30)])
    found = [hit for _, hit in postings.search("a", prints(1, 2), 3)]
    assert found == [Hit(29, 2.0), Hit(28, 2.0), Hit(27, 2.0)]


def test_the_largest_fingerprint_is_one_like_others() -> None:
    """2^32 - 1 neither overflows nor finds others."""
    postings = Postings()
    postings.add([Entry(number, "a", prints(number, 2**32 - 1)) for number in range(20)])
    assert len(postings.search("a", prints(2**32 - 1), 100)) == 20
    assert [hit.prompt_id for _, hit in postings.search("a", prints(7), 100)] == [7]


def test_there_are_few_arrays() -> None:
    """Each is at least some times as large as the next one, so their number is that of a logarithm."""
    postings = Postings()
    for number in range(2000):
        postings.add([Entry(number, "a", prints(*range(8 * number, 8 * number + 8)))])
    assert max(map(len, postings._runs)) <= 6
    assert sum(len(run) for runs in postings._runs for run in runs) + len(postings._young) == 16_000


def test_an_owner_is_asked_for() -> None:
    """A prompt is that of the namespace that has stored it, and of no other one."""
    postings = Postings()
    postings.add([Entry(1, "a", prints(1)), Entry(2, "b", prints(1))])
    assert postings.owned("a", [1, 2, 3]) == [1]
    assert postings.owned("c", [1, 2, 3]) == []


steps = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "forget", "compact"]),
        st.sampled_from(["a", "b"]),
        st.integers(0, 9),
        st.sets(st.sampled_from(ALL), max_size=6),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(steps)
def test_it_finds_what_a_dictionary_finds(history: list[tuple[str, str, int, set[int]]]) -> None:
    """Whatever was added, replaced, forgotten and compacted before."""
    postings, held = Postings(), dict[int, tuple[str, set[int]]]()
    for verb, namespace, prompt_id, values in history:
        if verb == "add":
            postings.add([Entry(prompt_id, namespace, prints(*values))])
            held[prompt_id] = namespace, values
        elif verb == "forget":
            postings.forget(postings.owned(namespace, [prompt_id]))
            if held.get(prompt_id, ("", set()))[0] == namespace:
                del held[prompt_id]
        else:
            postings = postings.compacted()
    for namespace in ("a", "b"):
        own = {each: values for each, (owner, values) in held.items() if owner == namespace}
        assert postings.count(namespace) == len(own)
        for asked in (set(ALL), set(ALL[:5]), set(ALL[7:9])):
            expected = Counter({each: len(values & asked) for each, values in own.items() if values & asked})
            found = postings.search(namespace, prints(*asked), 100)
            assert {hit.prompt_id: int(hit.score) for _, hit in found} == expected
            assert [hit.score for _, hit in found] == sorted(expected.values(), reverse=True)
            assert {owner for owner, _ in found} <= {namespace}
    assert postings.count() == len(held)
