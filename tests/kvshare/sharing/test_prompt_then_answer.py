"""A prompt is kept when it is prefilled, its answer when it has ended: what becomes of the node meanwhile."""

from __future__ import annotations

import numpy as np

from delta_tree import Node, token_ids
from kvshare.replay.policies.weightless import WeightlessKV, WeightlessSequence
from kvshare.sharing.memory_keeper import Computed, MemoryKeeper
from kvshare.sharing.plan import NoPlan
from kvshare.telemetry import Component, FallbackReason
from tests.kvshare.sharing.test_eviction_from_the_end import continued, new_keeper, store, tokens

PROMPT, WHOLE = 400, 450
CAPACITY = 1000


def computed(seed: int, length: int) -> Computed[WeightlessKV]:
    return Computed("n", tokens(seed, WHOLE)[:length], NoPlan(), WeightlessSequence(1))


def completed(keeper: MemoryKeeper[WeightlessKV], prompt: Node | None, seed: int = 1) -> Node | None:
    return keeper.complete(prompt, computed(seed, WHOLE), num_prompt=PROMPT)


def test_the_answer_makes_the_node_longer() -> None:
    keeper = new_keeper(CAPACITY)
    prompt = keeper.store_prompt(computed(1, PROMPT))
    assert prompt is not None
    node = completed(keeper, prompt)
    assert node is not None
    assert (node.node_id, node.num_tokens, node.exact_length) == (prompt.node_id, WHOLE, WHOLE)
    assert keeper.tier.num_bytes == WHOLE
    assert np.array_equal(node.token_ids, tokens(1, WHOLE))


def test_a_prompt_that_left_meanwhile_is_kept_again_with_its_answer() -> None:
    keeper = new_keeper(CAPACITY)
    prompt = keeper.store_prompt(computed(1, PROMPT))
    assert prompt is not None
    for seed in (2, 3):
        store(keeper, tokens(seed, 500))
    assert keeper.tree.get(prompt.node_id) is None
    node = completed(keeper, prompt)
    assert node is not None
    assert node.num_tokens == WHOLE
    assert keeper.tier.num_bytes == keeper.tree.stats().num_bytes <= CAPACITY


def test_a_prompt_that_lost_its_end_stays_as_it_is() -> None:
    keeper = new_keeper(CAPACITY)
    prompt = keeper.store_prompt(computed(1, PROMPT))
    assert prompt is not None
    keeper.tier.drop(keeper.tree.shorten(prompt.node_id, 350).freed_segments)
    node = completed(keeper, prompt)
    assert node is not None
    assert node.num_tokens == 350


def test_what_was_refused_is_not_tried_again() -> None:
    keeper = new_keeper(300)
    assert keeper.store_prompt(computed(1, PROMPT)) is None
    assert completed(keeper, None) is None
    assert keeper.telemetry.counts().fallbacks == {(Component.STORE, FallbackReason.TOO_LARGE): 1}


def test_a_known_prompt_with_another_answer_is_a_prompt_of_its_own() -> None:
    """The prompt was there, so `store` had nothing to add; the two share its segments."""
    keeper = new_keeper(CAPACITY)
    first = store(keeper, tokens(1, PROMPT))
    _, plan = continued(first, PROMPT - 1, PROMPT)
    ids = token_ids(np.concatenate([first.token_ids, tokens(7, WHOLE - PROMPT)]))
    assert keeper.store_prompt(Computed("n", first.token_ids, plan, WeightlessSequence(1))) is None
    node = keeper.complete(None, Computed("n", ids, plan, WeightlessSequence(1)), num_prompt=PROMPT)
    assert node is not None
    assert node.node_id != first.node_id
    assert first.pieces.segment_ids & node.pieces.segment_ids


def test_what_a_donor_begins_with_becomes_no_node_until_it_has_an_answer_of_its_own() -> None:
    """Asked again, greedily: nothing is new. With another answer it is a prompt of its own."""
    keeper = new_keeper(CAPACITY)
    first = completed(keeper, keeper.store_prompt(computed(1, PROMPT)))
    assert first is not None
    _, plan = continued(first, PROMPT - 1, PROMPT)
    again = Computed("n", first.token_ids[:PROMPT], plan, WeightlessSequence(1))
    assert keeper.store_prompt(again) is None
    same = Computed("n", first.token_ids, plan, WeightlessSequence(1))
    assert keeper.complete(None, same, num_prompt=PROMPT) is None
    assert len(keeper.tree.nodes()) == 1
    other = token_ids(np.concatenate([first.token_ids[:PROMPT], tokens(7, WHOLE - PROMPT)]))
    node = keeper.complete(None, Computed("n", other, plan, WeightlessSequence(1)), num_prompt=PROMPT)
    assert node is not None
    assert len(keeper.tree.nodes()) == 2
