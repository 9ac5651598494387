"""One candidate that is clearly the nearest: how it is found, and that nothing else is composed with it."""

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_tree import Composition, Target, compose, token_ids
from delta_tree.compose import _Layout
from delta_tree.nearest import clearly_nearest
from tests.delta_tree.fake_prompts import tokens
from tests.delta_tree.stored_prompts import StoredPrompts


def edited(rng: np.random.Generator, prompt: Sequence[int], num_edits: int) -> list[int]:
    """The prompt with some tokens replaced by more, fewer or as many others."""
    found = list(prompt)
    for place in sorted(rng.choice(len(prompt), num_edits, replace=False).tolist(), reverse=True):
        removed, added = rng.integers(0, 6, 2).tolist()
        found[place : place + removed] = rng.integers(0, 30_000, added).tolist()
    return found


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(4)


@pytest.mark.parametrize("num_tokens", [500, 20_000])
def test_a_prompt_with_few_edits_is_nearest(rng: np.random.Generator, num_tokens: int) -> None:
    """Among others with more edits, and unrelated ones."""
    first = rng.integers(0, 30_000, num_tokens).tolist()
    near = edited(rng, first, num_tokens // 100)
    target = Target(token_ids(edited(rng, near, num_tokens // 100)), min_run=16)
    unrelated = rng.integers(0, 30_000, num_tokens).tolist()
    assert clearly_nearest(target, [*map(token_ids, (unrelated, first, near))], 0) == 2
    assert clearly_nearest(target, [*map(token_ids, (near, near))], 0) is None  # neither of them
    assert clearly_nearest(target, [token_ids(unrelated)], 0) is None


def test_what_follows_the_exact_prefix_counts(rng: np.random.Generator) -> None:
    """The prefix is copied in any case, and where little follows there is nothing to choose."""
    first = rng.integers(0, 30_000, 600).tolist()
    target = Target(token_ids(first), min_run=16)
    prompts = [token_ids(first[:500]), token_ids([*first[400:], *first[:100]])]
    assert clearly_nearest(target, prompts, 0) == 0
    assert clearly_nearest(target, prompts, 500) == 1
    assert clearly_nearest(target, prompts, 590) is None
    assert clearly_nearest(target, [], 0) is None


def composed(
    prompts: StoredPrompts, target: Sequence[int], nearest: int | None, **limits: Any
) -> Composition:
    """With this candidate as the nearest one."""
    with patch("delta_tree.compose.nearest_or_composed", lambda *_, **__: (nearest, None)):
        return compose(
            token_ids(target),
            prompts.nodes,
            prompts.segment_of,
            max_generation=9,
            allow_approximate=True,
            **limits,
        )


@given(st.data())
@settings(max_examples=300)
def test_nothing_else_is_composed_than_by_looking_at_all(data: st.DataObject) -> None:
    """If the nearest candidate is the one that a search prefers, the copies are the same."""
    prompts = StoredPrompts()
    for _ in range(data.draw(st.integers(1, 4))):
        generations = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3))
        prompts.add(data.draw(tokens(25, 2, min_size=1)), generations)
    target = data.draw(tokens(30, 2, min_size=1))
    limits = {"min_run": data.draw(st.integers(1, 6)), "max_donors": data.draw(st.integers(1, 4))}
    preferred = []
    place_best = _Layout.place_best_donor

    def noted(layout: _Layout, *donors: Any) -> Any:
        preferred.append(place_best(layout, *donors))
        return preferred[-1]

    with patch.object(_Layout, "place_best_donor", noted):
        searched = composed(prompts, target, None, gives_reasons=False, **limits)
    if preferred[0] is None:
        return
    for gives_reasons in (False, True):
        made = composed(prompts, target, preferred[0].place, gives_reasons=gives_reasons, **limits)
        assert made.copies == searched.copies
        assert made.exact_length == searched.exact_length
