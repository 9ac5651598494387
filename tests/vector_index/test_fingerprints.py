"""Winnowed fingerprints: the guarantee, the format, the cap."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vector_index import NominatorSettings
from vector_index.fingerprints import bind, fingerprints

GOLDEN = [13642877]

token_lists = st.lists(st.integers(0, 3), max_size=60)


def tokens(values: list[int]) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    return np.array(values, dtype=np.int32)


@settings(max_examples=300, deadline=None)
@given(
    kgram=st.integers(1, 7),
    window=st.integers(1, 9),
    before=st.tuples(token_lists, token_lists),
    after=st.tuples(token_lists, token_lists),
    data=st.data(),
)
def test_a_long_common_stretch_shares_a_fingerprint(
    kgram: int,
    window: int,
    before: tuple[list[int], list[int]],
    after: tuple[list[int], list[int]],
    data: st.DataObject,
) -> None:
    """A stretch of kgram + window - 1 tokens is enough, whatever stands around it."""
    size = kgram + window - 1
    common = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size + 5))
    first, second = (
        fingerprints(tokens(head + common + tail), kgram=kgram, window=window)
        for head, tail in zip(before, after, strict=True)
    )
    assert len(np.intersect1d(first, second)) >= 1


@settings(max_examples=200, deadline=None)
@given(token_lists, st.integers(1, 6), st.integers(1, 6))
def test_fingerprints_equal_the_definition(values: list[int], kgram: int, window: int) -> None:
    """The vectorised minima are those of a plain loop over the k-grams' hashes."""
    ids = tokens(values)
    hashes = [
        int(fingerprints(ids[i : i + kgram], kgram=kgram, window=1)[0]) for i in range(len(ids) - kgram + 1)
    ]
    reach = min(window, len(hashes))
    minima = {min(hashes[i : i + reach]) for i in range(len(hashes) - reach + 1)} if hashes else {}
    assert fingerprints(ids, kgram=kgram, window=window).tolist() == sorted(minima)


def test_a_prompt_below_one_kgram_has_none() -> None:
    """Too few tokens for one k-gram give an empty array, one token more gives one fingerprint."""
    assert fingerprints(tokens([1] * 15), kgram=16, window=32).dtype == np.uint32
    assert len(fingerprints(tokens([1] * 15), kgram=16, window=32)) == 0
    assert len(fingerprints(tokens([1] * 16), kgram=16, window=32)) == 1


def test_the_cap_keeps_the_smallest() -> None:
    """With a cap the smallest hashes stay, so that two capped prompts keep the same ones."""
    ids = np.arange(5000, dtype=np.int32)
    everything = fingerprints(ids, kgram=8, window=8)
    capped = fingerprints(ids, kgram=8, window=8, max_fingerprints=100)
    assert capped.tolist() == everything[:100].tolist()


def test_a_short_passage_of_a_very_long_prompt_is_found() -> None:
    """The bound grows with the prompt: 16 tokens of 100,000 share one, with the settings as they are."""
    limits = NominatorSettings()
    rng = np.random.default_rng(4)
    stored, query = rng.integers(0, 30_000, (2, 100_000), dtype=np.int32)

    def prints(ids: np.ndarray) -> np.ndarray:
        return fingerprints(
            ids,
            kgram=limits.kgram,
            window=limits.window,
            max_fingerprints=limits.max_fingerprints_of(len(ids)),
        )

    length = limits.kgram + limits.window - 1
    before = np.intersect1d(prints(stored), prints(query))
    for start in range(0, 90_000, 9_000):
        shared = query.copy()
        shared[start + 500 : start + 500 + length] = stored[start : start + length]
        assert len(np.intersect1d(prints(stored), prints(shared))) > len(before)


def test_density_is_near_two_in_window_plus_one() -> None:
    """Random tokens give about 2 / (window + 1) fingerprints each."""
    ids = np.random.default_rng(1).integers(0, 30_000, 20_000, dtype=np.int32)
    density = len(fingerprints(ids, kgram=16, window=32)) / len(ids)
    assert density == pytest.approx(2 / 33, rel=0.1)


def test_fingerprints_are_the_same_in_another_process() -> None:
    """What is stored on disk must mean the same after a restart."""
    program = (
        "import numpy as np; from vector_index.fingerprints import *; "
        "ids = np.arange(200, dtype=np.int32); "
        "print(bind(fingerprints(ids, kgram=16, window=32), 'a').tolist())"
    )
    there = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    here = bind(fingerprints(np.arange(200, dtype=np.int32), kgram=16, window=32), "a")
    assert there.strip() == str(here.tolist())


def test_stored_fingerprints_never_change_meaning() -> None:
    """A changed hash makes every stored index useless: raise SCHEMA_VERSION when this fails."""
    ids = np.arange(40, dtype=np.int32)
    assert fingerprints(ids, kgram=16, window=32).tolist() == GOLDEN


def test_bind_keeps_all_and_tells_namespaces_apart() -> None:
    """Binding is one to one within a namespace, sorted, and differs between namespaces."""
    prints = np.unique(np.random.default_rng(2).integers(0, 2**32, 500, dtype=np.uint32))
    bound, other = bind(prints, "a"), bind(prints, "b")
    assert len(np.unique(bound)) == len(prints)
    assert (np.diff(bound.astype(np.int64)) > 0).all()
    assert len(np.intersect1d(bound, other)) < 5


@pytest.mark.parametrize("bad", [{"kgram": 0}, {"window": 0}, {"max_fingerprints": 0}])
def test_parameters_below_one_are_refused(bad: dict[str, int]) -> None:
    """Zero is no length."""
    with pytest.raises(ValueError, match="must be >= 1"):
        fingerprints(tokens([1]), **{"kgram": 4, "window": 4, **bad})
