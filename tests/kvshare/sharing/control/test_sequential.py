"""The sequential test: how often it finds what is not there, and how soon what is."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvshare.sharing.control.sequential import Finding, SequentialTest

Noise = Callable[[random.Random], float]
# One of twenty is far slower, or far faster: a small group often has seen none of them.
NOISES: dict[str, Noise] = {
    "normal": lambda chance: chance.gauss(0, 0.2),
    "skewed": lambda chance: chance.expovariate(5) - 0.2,
    "heavy tails": lambda chance: 0.1 * chance.gauss(0, 1) / max(0.1, chance.random()),
    "rarely slow": lambda chance: (0.8 if chance.random() < 0.05 else 0.0) + chance.gauss(0, 0.05),
    "rarely fast": lambda chance: (-0.8 if chance.random() < 0.05 else 0.0) + chance.gauss(0, 0.05),
}


def played(seed: int, noise: Noise, *, slower: float, share: float = 0.1) -> tuple[Finding | None, int]:
    """The finding, looked for after each figure, and the size of the smaller group then."""
    chance, test = random.Random(seed), SequentialTest(confidence=0.99, least=0.03)
    while not test.is_full:
        shares_more = chance.random() > share
        test.add(noise(chance) + (slower if shares_more else 0.0), shares_more=shares_more)
        if (found := test.finding()) is not None:
            return found, test.num_each
    return None, test.num_each


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES.keys())
@pytest.mark.parametrize("share", [0.1, 0.5])
def test_no_difference_is_hardly_ever_found_however_often_it_is_asked(noise: Noise, share: float) -> None:
    """One in a hundred at most is promised; these are fifty of each kind, with fixed seeds."""
    findings = [played(seed, noise, slower=0.0, share=share)[0] for seed in range(50)]
    assert sum(found is not None for found in findings) <= 2


@pytest.mark.parametrize(
    ("slower", "expected", "blocks"),
    [(0.1, Finding.SLOWER, 150), (0.15, Finding.SLOWER, 90), (-0.4, Finding.FASTER, 30)],
)
@pytest.mark.parametrize("name", NOISES)
def test_a_difference_that_matters_is_found(name: str, slower: float, expected: Finding, blocks: int) -> None:
    """By most of the tests, after so few figures of the smaller group, of any kind of noise."""
    played_tests = [played(seed, NOISES[name], slower=slower) for seed in range(20)]
    assert all(found in (expected, None) for found, _ in played_tests)
    sizes = sorted(size for found, size in played_tests if found is expected)
    assert len(sizes) >= 14
    assert sizes[len(sizes) // 2] <= blocks


def test_a_difference_that_is_sure_and_small_does_not_matter() -> None:
    """Two per cent are left alone, though without noise they are certain."""
    test = SequentialTest(confidence=0.99, least=0.03)
    for number in range(200):
        test.add(0.02 if number % 2 else 0.0, shares_more=bool(number % 2))
    assert test.difference == pytest.approx(0.02)
    assert test.finding() is None


def test_one_figure_far_from_all_others_decides_nothing() -> None:
    """A request that hung for minutes is one figure, and counts as if it were not that far."""
    test = SequentialTest(confidence=0.99, least=0.03)
    for number in range(40):
        test.add(0.001 * (number % 3), shares_more=bool(number % 2))
    test.add(1000.0, shares_more=True)
    assert test.finding() is None


def test_too_few_figures_say_nothing() -> None:
    """However clear they seem."""
    test = SequentialTest(confidence=0.99, least=0.03)
    for number in range(14):
        test.add(0.5 * (number % 2) + 0.001 * number, shares_more=bool(number % 2))
        assert test.finding() is None
    assert test.leaning > 1
