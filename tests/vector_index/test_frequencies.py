"""Which fingerprints a prompt is stored with and a search asks for, given how common they are."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from vector_index.fingerprints import FingerprintFrequencies

COMMON = np.arange(50, dtype=np.uint32)
EVERYTHING = {"max_postings": 10**9, "min_asked": 4, "max_asked": 2048}


def rare(prompt: int) -> NDArray[np.uint32]:
    return np.arange(1000 + prompt * 50, 1050 + prompt * 50, dtype=np.uint32)


def prints(*values: int) -> NDArray[np.uint32]:
    return np.array(values, dtype=np.uint32)


def filled(num_prompts: int, *, max_holders: int = 10**9) -> FingerprintFrequencies:
    """Every prompt has the 50 common fingerprints and 50 of its own."""
    frequencies = FingerprintFrequencies(max_holders=max_holders)
    for prompt in range(num_prompts):
        frequencies.add("a", prompt, np.concatenate([COMMON, rare(prompt)]))
    return frequencies


def asked_of(frequencies: FingerprintFrequencies, **limits: int) -> NDArray[np.uint32]:
    return frequencies.rarest(np.concatenate([COMMON, rare(7)]), **{**EVERYTHING, **limits})


def test_everything_is_asked_within_the_budget() -> None:
    """A budget larger than all postings leaves nothing out."""
    assert len(asked_of(filled(100))) == 100


def test_the_rarest_are_asked_first() -> None:
    """A tight budget keeps the fingerprints that few prompts have and drops the common ones."""
    chosen = asked_of(filled(100), max_postings=60)
    assert set(rare(7).tolist()) == set(chosen.tolist())


def test_some_are_asked_even_where_all_are_common() -> None:
    """A prompt made of common passages only still finds a donor of them."""
    assert len(filled(100).rarest(COMMON, max_postings=1, min_asked=4, max_asked=2048)) == 4


def test_the_cost_does_not_grow_with_the_namespace() -> None:
    """With ten times the prompts the postings walked through stay within the budget."""
    for num_prompts in (100, 1000):
        num_common = len(np.intersect1d(asked_of(filled(num_prompts), max_postings=500), COMMON))
        assert num_common * num_prompts <= 500


def test_a_fingerprint_of_many_is_not_stored_again() -> None:
    """Beyond `max_holders` a prompt goes without the common ones and keeps its own."""
    frequencies = filled(10, max_holders=10)
    held = frequencies.add("a", 99, np.concatenate([COMMON, rare(99)]))
    assert held.tolist() == rare(99).tolist()


def test_a_forgotten_holder_makes_room_for_the_next() -> None:
    """Where the holders of a passage leave, later prompts are stored with it again."""
    frequencies = filled(10, max_holders=10)
    frequencies.remove("a", 3)
    assert len(frequencies.add("a", 98, COMMON)) == 50
    assert len(frequencies.add("a", 99, COMMON)) == 0
    frequencies.remove("a", 99)  # held none: leaves no room
    assert len(frequencies.add("a", 97, COMMON)) == 0


def test_adding_an_id_again_replaces_its_counts() -> None:
    """A prompt counts once, with what it was last added with."""
    frequencies = FingerprintFrequencies(max_holders=1)
    for values in ([1, 2], [2, 3], [2, 3]):
        assert frequencies.add("a", 7, prints(*values)).tolist() == values
    assert frequencies.add("a", 8, prints(1, 2, 3)).tolist() == [1]


def test_unknown_prompts_are_removed_without_harm() -> None:
    """Forgetting what was never added, or in another namespace, changes nothing."""
    frequencies = filled(10, max_holders=10)
    frequencies.remove("b", 3)
    frequencies.remove("a", 77)
    assert len(frequencies.add("a", 99, COMMON)) == 0


def test_nothing_known_asks_for_everything() -> None:
    """Without counts, as after a start over an index on disk, nothing is held to be common."""
    frequencies = FingerprintFrequencies(max_holders=1)
    assert frequencies.rarest(COMMON, max_postings=1, min_asked=1, max_asked=2048).tolist() == COMMON.tolist()


def test_no_fingerprints_select_none() -> None:
    """A prompt without fingerprints is no special case."""
    frequencies = filled(3)
    assert len(frequencies.rarest(prints(), max_postings=1, min_asked=4, max_asked=2048)) == 0
    assert len(frequencies.add("a", 99, prints())) == 0


def test_strangers_do_not_make_a_fingerprint_common() -> None:
    """Among 300,000 other fingerprints in the buckets, a rare one is not counted as common."""
    frequencies = FingerprintFrequencies(max_holders=8)
    rng = np.random.default_rng(0)
    for prompt in range(3000):
        # Small values, as the minima of winnowing are: only their low bits tell them apart.
        own = np.unique(rng.integers(0, 2**27, 100, dtype=np.uint32))
        assert len(frequencies.add("a", prompt, own)) == len(own)


def test_no_holders_at_all_are_refused() -> None:
    """A passage that no prompt may hold could never be found."""
    with pytest.raises(ValueError, match="max_holders 0"):
        FingerprintFrequencies(max_holders=0)


steps = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "remove"]),
        st.sampled_from(["a", "b"]),
        st.integers(0, 5),
        st.sets(st.integers(0, 6), max_size=5),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(steps)
def test_the_counts_equal_a_dictionary(history: list[tuple[str, str, int, set[int]]]) -> None:
    """After any adds, replacements and removals exactly those are held that have fewer holders."""
    frequencies = FingerprintFrequencies(max_holders=2)
    held: dict[tuple[str, int], set[int]] = {}
    for verb, namespace, prompt_id, values in history:
        key = (namespace, prompt_id)
        if verb == "add":
            held.pop(key, None)
            # The namespaces' numbers do not meet here, as `bind` sees to it there.
            asked = sorted(value + 100 * (namespace == "b") for value in values)
            counts = Counter(value for other in held.values() for value in other)
            expected = [value for value in asked if counts[value] < 2]
            assert frequencies.add(namespace, prompt_id, prints(*asked)).tolist() == expected
            held[key] = set(expected)
        else:
            frequencies.remove(namespace, prompt_id)
            held.pop(key, None)


def test_a_long_prompt_asks_for_an_even_choice_of_held_fingerprints() -> None:
    """Of more fingerprints than are asked for at once, those that no prompt holds are left out first."""
    frequencies = FingerprintFrequencies(max_holders=100)
    frequencies.add("a", 1, prints(*range(0, 10_000, 10)))
    asked = frequencies.rarest(prints(*range(10_000)), **{**EVERYTHING, "max_asked": 100})
    assert len(asked) == 100
    assert np.count_nonzero(asked % 10 == 0) == 100
    assert (np.diff(asked.astype(int)) == 100).all()


def test_what_a_prompt_holds_is_known_until_it_is_forgotten() -> None:
    """As it was given back by `add`; other namespaces' prompts are not known."""
    frequencies = FingerprintFrequencies(max_holders=1)
    frequencies.add("a", 1, prints(3, 4))
    frequencies.add("a", 2, prints(4, 5))
    held = frequencies.held("a", 2)
    assert held is not None
    assert held.tolist() == [5]
    assert frequencies.held("b", 1) is None
    frequencies.remove("a", 1)
    assert frequencies.held("a", 1) is None
