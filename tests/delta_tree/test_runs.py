"""Common runs of two prompts, relocated ones included."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_tree import Match, common_runs, token_ids
from delta_tree.kgrams import Sieve, kgram_hashes, quick_hashes, some_hashes
from delta_tree.runs import Pair
from tests.delta_tree.fake_prompts import ADVERSARIAL, edited_pairs


def check_runs(source: list[int], target: list[int], min_run: int) -> list[Match]:
    """The runs, after checking all that common_runs promises of them."""
    runs = common_runs(token_ids(source), token_ids(target), min_run=min_run)
    covered: set[int] = set()
    at = 0
    for run in runs:
        assert run.length >= min_run
        assert run.target >= at
        at = run.target + run.length
        assert source[run.source : run.source + run.length] == target[run.target : at]
        covered.update(range(run.target, at))
    known = {tuple(source[i : i + min_run]) for i in range(len(source) - min_run + 1)}
    for start in range(len(target) - min_run + 1):
        window = range(start, start + min_run)
        if covered.isdisjoint(window):
            assert tuple(target[start : start + min_run]) not in known
    return runs


@given(edited_pairs(), st.integers(1, 8))
def test_runs_are_equal_apart_and_leave_nothing_out(pair: tuple[list[int], list[int]], min_run: int) -> None:
    """Runs hold equal tokens, do not overlap, and no common stretch lies between them."""
    check_runs(*pair, min_run)


@pytest.mark.parametrize("name", ADVERSARIAL)
@pytest.mark.parametrize("min_run", [1, 3, 16])
def test_runs_of_adversarial_pairs(name: str, min_run: int) -> None:
    """Degenerate and repetitive prompts keep the promises, too."""
    check_runs(*ADVERSARIAL[name], min_run)


def test_documents_in_another_order_are_found_whole() -> None:
    """Each document of a RAG prompt is one run, wherever it stands."""
    documents = [list(range(start, start + 40)) for start in (1000, 2000, 3000)]
    source = [*documents[0], *documents[1], *documents[2]]
    target = [*documents[2], 7, *documents[0], 8, 9, *documents[1]]
    assert check_runs(source, target, 16) == [
        Match(80, 0, 40),
        Match(0, 41, 40),
        Match(40, 83, 40),
    ]


def test_a_run_takes_its_head_back_from_a_shorter_one() -> None:
    """Where boilerplate ends in the head of a document, the document keeps its head."""
    document = list(range(100, 150))
    source = [*range(10), *document[:5], 77, *document]
    target = [*range(10), *document]
    runs = check_runs(source, target, 10)
    assert runs == [Match(0, 0, 10), Match(16, 10, 50)]


def test_the_nearest_of_equal_places_is_taken() -> None:
    """A text that stands twice in the source is taken from where it moves least."""
    text = list(range(100, 120))
    source = [*text, *range(30), *text]
    assert common_runs(token_ids(source), token_ids([*range(200, 248), *text]), min_run=16) == [
        Match(50, 48, 20)
    ]


@pytest.mark.parametrize("step", [1, 15, 16, 40, 5000])
@pytest.mark.parametrize("k", [1, 7, 16])
def test_some_hashes_are_some_of_all(k: int, step: int) -> None:
    for length in (0, k - 1, k, 3000):
        tokens = token_ids(np.random.default_rng(length).integers(0, 2**31, length))
        assert some_hashes(tokens, k, step).tolist() == quick_hashes(tokens, k)[::step].tolist()


@pytest.mark.parametrize("hash_of", [kgram_hashes, quick_hashes])
@given(st.lists(st.integers(0, 5), max_size=40), st.integers(1, 20))
def test_hashes_name_kgrams(hash_of: Callable[..., np.ndarray], ids: list[int], k: int) -> None:
    """There is one hash per window, equal for equal windows and only for those."""
    hashes = hash_of(token_ids(ids), k).tolist()
    windows = [tuple(ids[i : i + k]) for i in range(len(ids) - k + 1)]
    assert len(hashes) == len(windows)
    assert len(set(zip(hashes, windows, strict=True))) == len(set(windows)) == len(set(hashes))


def test_long_prompts_are_hashed_like_short_ones() -> None:
    """Hashing block by block gives what hashing each window alone does."""
    ids = token_ids(np.random.default_rng(5).integers(0, 9, 40_000))
    hashes = quick_hashes(ids, 16)
    assert len(hashes) == len(ids) - 15
    for at in (0, 1, 2**14 - 1, 2**14, 2**15 - 1, 2**15, len(hashes) - 1):
        assert hashes[at] == quick_hashes(ids[at : at + 16], 16)[0]


def test_the_sieve_lets_every_member_pass() -> None:
    """A member of the collection always passes, a foreign hash hardly ever."""
    rng = np.random.default_rng(3)
    members, foreign = rng.integers(0, 2**32, (2, 2000), dtype=np.uint32)
    sieve = Sieve(members)
    assert sieve.passing(members).tolist() == list(range(2000))
    assert len(sieve.passing(foreign)) < 20


def test_a_common_run_in_front_of_the_start_does_not_count() -> None:
    """Although the sieve lets it pass, and the sorted hashes are those of the whole target."""
    source, target = token_ids([*range(700, 740)]), token_ids([*range(700, 740), *range(1400, 1700)])
    hashes = quick_hashes(source, 8), quick_hashes(target, 8)
    pair = Pair(source, target, *hashes, 8)
    places = np.arange(len(hashes[0]))
    assert pair.has_common_run(places, lambda: np.sort(hashes[1]))
    assert not pair.has_common_run(places, lambda: np.sort(hashes[1]), start=40)
