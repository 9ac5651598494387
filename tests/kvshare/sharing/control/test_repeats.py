"""Which prompts are stored where not all are: those that a later one is likely to copy."""

from __future__ import annotations

import numpy as np
import pytest

from delta_tree import TokenIds, token_ids
from kvshare.reasons import Reason
from kvshare.sharing.control import Controller, Treatment
from kvshare.sharing.control.repeats import Repeats
from tests.kvshare.sharing.control.simulated_server import CHOSEN


def prompt(seed: int, length: int = 2000) -> TokenIds:
    return token_ids(np.random.default_rng(seed).integers(0, 30_000, length))


def after(beginning: TokenIds, seed: int) -> TokenIds:
    """A prompt of 2,000 other tokens behind a beginning."""
    return token_ids(np.concatenate([beginning, prompt(seed)]))


def edited(tokens: TokenIds) -> TokenIds:
    changed = np.array(tokens)
    changed[:: len(changed) // 5] += 1
    return token_ids(changed)


@pytest.mark.parametrize(
    ("earlier", "now", "reused", "expected"),
    [
        ([], prompt(1), 0.0, False),
        ([prompt(1)], prompt(2), 0.0, False),
        ([prompt(1)], edited(prompt(1)), 0.0, True),
        ([prompt(1)], edited(prompt(1)), 0.9, True),  # one of a family, of which some is stored
        ([after(prompt(1), 2)], after(prompt(1), 3), 0.0, True),  # the beginning repeats and is not stored
        ([after(prompt(1), 2)], after(prompt(1), 3), 0.45, False),  # it is stored: the rest is new
        ([after(prompt(1, 300), 2)], after(prompt(1, 300), 3), 0.0, False),  # too little repeats
        ([prompt(1, 10)], prompt(1, 10), 0.0, False),
    ],
)
def test_a_prompt_is_stored_if_it_resembles_an_earlier_one(
    earlier: list[TokenIds], now: TokenIds, reused: float, expected: bool
) -> None:
    """`reused` is the share of it that is stored already and copied."""
    repeats = Repeats()
    for tokens in earlier:
        repeats.is_worth_saving("one", tokens, reused=0.0)
    assert repeats.is_worth_saving("one", now, reused=reused) is expected


def test_another_namespace_has_seen_nothing() -> None:
    """What a tenant sent says nothing to another one."""
    repeats = Repeats()
    repeats.is_worth_saving("one", prompt(1), reused=0.0)
    assert not repeats.is_worth_saving("two", prompt(1), reused=0.0)


def test_what_came_long_ago_is_forgotten() -> None:
    """And new prompts do not seem to repeat, however many came."""
    repeats = Repeats()
    repeats.is_worth_saving("one", prompt(0), reused=0.0)
    assert not any(repeats.is_worth_saving("one", prompt(1 + n, 40_000), reused=0.0) for n in range(120))
    assert not repeats.is_worth_saving("one", prompt(0), reused=0.0)


@pytest.mark.parametrize(
    ("treatment", "expected"),
    [
        (Treatment(), True),
        (Treatment(refusal=Reason.EXPERIMENT), False),
        (Treatment(refusal=Reason.REDUCED, saves_all=False), False),
        (Treatment(saves_all=False), False),
    ],
)
def test_what_the_controller_lets_be_stored(treatment: Treatment, expected: bool) -> None:
    """Of prompts that are like no other: all as usual, none without sharing, none on a lower rung."""
    controller = Controller(CHOSEN, full_s=lambda _: 1.0, break_even=lambda: 0)
    assert controller.may_save(treatment, "one", prompt(1), num_reused=0) is expected
