"""The rungs of the ladder: how much is shared at one load, from everything down to nothing."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

_FACTORS = {2: 2, 3: 4, 4: 8}
_SHORTEST_TOKENS = (
    512  # the least break-even length that counts: at loads with a lower rung the learned one is too short
)
_TEXTS = {
    0: "everything is shared",
    1: "prompts are stored only if they resemble an earlier one",
    2: "prompts are shared only from twice the break-even length on",
    3: "prompts are shared only from four times the break-even length on",
    4: "prompts are shared only from eight times the break-even length on",
    5: "nothing is shared",
}


class Rung(IntEnum):
    """
    How much is shared: the larger the value, the less. From `WANTED_SAVES` on, only prompts that are likely
    to be copied are stored.
    """

    EVERYTHING = 0
    WANTED_SAVES = 1
    DOUBLE = 2
    FOURFOLD = 3
    EIGHTFOLD = 4
    NOTHING = 5

    @property
    def text(self) -> str:
        return _TEXTS[self]

    @property
    def lower(self) -> Rung:
        """Return the next rung down, on which less is shared."""
        return Rung(min(self + 1, Rung.NOTHING))

    @property
    def higher(self) -> Rung:
        """Return the next rung up, on which more is shared."""
        return Rung(max(self - 1, Rung.EVERYTHING))

    @property
    def saves_all(self) -> bool:
        """Return whether a prompt is stored even if no earlier one resembles it."""
        return self is Rung.EVERYTHING

    def shares(self, num_tokens: int, break_even: Callable[[], float]) -> bool:
        """
        Return whether a prompt of this length is looked up and stored.

        `break_even` gives the shortest prompt for which sharing pays by the learned costs, or infinity.
        """
        if self is Rung.NOTHING:
            return False
        if (factor := _FACTORS.get(self)) is None:
            return True
        return num_tokens >= factor * max(break_even(), _SHORTEST_TOKENS)
