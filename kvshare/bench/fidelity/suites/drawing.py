"""Drawing what a draft is made of: the same for the same number, and values that cannot be confused."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from kvshare.bench.fidelity.scenario import SEED

T = TypeVar("T")

_MAX_TRIES = 1000


def in_turn(items: Sequence[T], number: int) -> T:
    """Each as often as the others, in their order."""
    return items[number % len(items)]


def source_for(items: Sequence[T], number: int) -> T:
    """Each as often as the others, in another order each time round: labels do not depend on sources."""
    times_round, place = divmod(number, len(items))
    return random.Random(f"{SEED}:{times_round}").sample(items, len(items))[place]


def shuffled(items: Sequence[T], draw: random.Random) -> list[T]:
    """In another order, if there is one."""
    order = list(items)
    while order == list(items) and any(item != items[0] for item in items):
        draw.shuffle(order)
    return order


def fresh(make: Callable[[], str], taken: Iterable[str], *, whole: bool = True) -> str:
    """
    The first value made that neither is contained in a taken one nor contains one, counted in words.

    Without `whole`, not even one word may be shared.
    Raises:  ValueError if 1,000 values are all taken
    """
    others = [set(other.split()) for other in taken]
    for _ in range(_MAX_TRIES):
        value = make()
        words = set(value.split())
        if not any((words <= other or other <= words) if whole else words & other for other in others):
            return value
    raise ValueError(f"{_MAX_TRIES} tries brought nothing that is not among {len(others)} values")


def four_answers(right: str, stale: str, another: Callable[[Sequence[str]], str]) -> tuple[str, ...]:
    """The right answer, the stored prompt's and two wrong ones; `another` is called with those so far."""
    found = [right, stale]
    for _ in range(2):
        found.append(another(found))
    return tuple(found)
