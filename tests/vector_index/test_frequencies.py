"""Which fingerprints a search asks for, given how common they are."""

from typing import Any

import numpy as np

from vector_index.frequencies import FingerprintFrequencies

COMMON = np.arange(50, dtype=np.uint32)


def rare(prompt: int) -> Any:
    return np.arange(1000 + prompt * 50, 1050 + prompt * 50, dtype=np.uint32)


def filled(num_prompts: int) -> FingerprintFrequencies:
    """Every prompt has the 50 common fingerprints and 50 of its own."""
    frequencies = FingerprintFrequencies()
    for prompt in range(num_prompts):
        frequencies.add("a", np.concatenate([COMMON, rare(prompt)]))
    return frequencies


def asked_of(frequencies: FingerprintFrequencies, num_prompts: int, **limits: int) -> Any:
    asked = np.concatenate([COMMON, rare(7)])
    limits = {"max_postings": 10**9, "min_asked": 4, **limits}
    return frequencies.rarest("a", asked, num_prompts=num_prompts, **limits)


def test_everything_is_asked_within_the_budget() -> None:
    """A budget larger than all postings leaves nothing out."""
    chosen = asked_of(filled(100), 100)
    assert len(chosen) == 100


def test_the_rarest_are_asked_first() -> None:
    """A tight budget keeps the fingerprints that few prompts have and drops the common ones."""
    chosen = asked_of(filled(100), 100, max_postings=60)
    assert set(rare(7).tolist()) == set(chosen.tolist())


def test_some_are_asked_even_where_all_are_common() -> None:
    """A prompt made of common passages only still finds somebody who has them."""
    frequencies = filled(100)
    limits = {"num_prompts": 100, "max_postings": 1, "min_asked": 4}
    assert len(frequencies.rarest("a", COMMON, **limits)) == 4


def test_the_cost_does_not_grow_with_the_namespace() -> None:
    """With ten times the prompts the postings walked through stay within the budget."""
    for num_prompts in (100, 1000):
        chosen = asked_of(filled(num_prompts), num_prompts, max_postings=500)
        num_common = len(np.intersect1d(chosen, COMMON))
        assert num_common * num_prompts <= 500


def test_forgotten_prompts_do_not_make_a_fingerprint_common() -> None:
    """Counts are scaled to the prompts that are left, so churn alone hides nobody."""
    chosen = asked_of(filled(1000), 10, max_postings=600)
    assert len(chosen) == 100


def test_an_unknown_namespace_asks_for_everything() -> None:
    """Without counts, as after a start over an index on disk, nothing is held to be common."""
    chosen = FingerprintFrequencies().rarest("b", COMMON, num_prompts=5, max_postings=1, min_asked=1)
    assert chosen.tolist() == COMMON.tolist()


def test_no_fingerprints_select_none() -> None:
    """A prompt without fingerprints is no special case."""
    none = np.empty(0, dtype=np.uint32)
    chosen = filled(3).rarest("a", none, num_prompts=3, max_postings=1, min_asked=4)
    assert len(chosen) == 0


def test_clear_and_forget_namespace_reset_the_counts() -> None:
    """After either nothing of the namespace is common any more."""
    for reset in ("clear", "forget"):
        frequencies = filled(100)
        if reset == "clear":
            frequencies.clear()
        else:
            frequencies.forget_namespace("a")
        assert len(asked_of(frequencies, 100, max_postings=1)) == 100
