"""What is stored of a request over its donors, and what stays while it runs."""

import numpy as np
import pytest

from delta_tree import Node, Span, token_ids
from kvshare.embedded.model import EmbeddedModel
from kvshare.kv.attention import PartialPass
from kvshare.kv.tier import MemoryTier
from kvshare.requests import Prompt
from kvshare.sharing.memory_keeper import Computed
from kvshare.sharing.pipeline import Sharing
from kvshare.sharing.plan import Plan
from kvshare.telemetry import Component, FallbackReason
from kvshare_lab.bench.random_models import tiny_model
from tests.kvshare.sharing.tiny_sharing import (
    TEXT,
    FixedNominator,
    donor_for,
    fallbacks,
    keeper_of,
    look_up,
    prompt,
    sharing_with,
    store,
)


def donor_and_edit(sharing: Sharing, model: EmbeddedModel) -> tuple[Node, Prompt]:
    """A stored prompt of 400 tokens, and the same with ten other ones in it."""
    base = prompt(400).token_ids
    changed = np.array(base)
    changed[100:110] = 299
    return donor_for(sharing, model, base), Prompt(token_ids(changed), TEXT)


async def test_a_plan_is_stored_as_pieces_over_the_donors_segments(model: EmbeddedModel) -> None:
    """Only what was computed costs bytes; the rest of the node points to the donor's segment."""
    sharing = sharing_with(FixedNominator(), model)
    donor, wanted = donor_and_edit(sharing, model)
    lookup = await look_up(sharing, wanted)
    assert isinstance(lookup.plan, Plan)
    before = sharing.tier.num_bytes
    node = store(sharing, model, wanted.token_ids, plan=lookup.plan)
    assert node is not None
    assert sharing.tree.ancestors(node.node_id) == (donor.node_id,)
    # Behind the edit, up to the first copy, everything was computed after exact KV: it is exact.
    assert node.exact_length == lookup.plan.first_approximate
    grown = sharing.tier.num_bytes - before
    assert grown == lookup.plan.num_computed * model.layout.bytes_per_token
    generations = [sharing.tree.segment(piece.segment_id).generation for piece in node.pieces]
    assert generations == [0, 0, 0, 1]  # prefix, edit and window, copy, tail
    assert sharing.tree.stats().num_bytes == sharing.tier.num_bytes


async def test_the_same_prompt_twice_is_stored_once(model: EmbeddedModel) -> None:
    """Its second KV is let go."""
    sharing = sharing_with(FixedNominator(), model)
    tokens = prompt(100).token_ids
    assert store(sharing, model, tokens) is not None
    assert store(sharing, model, tokens) is None
    assert sharing.tree.stats().num_nodes == 1
    assert isinstance(sharing.tier, MemoryTier)
    assert len(sharing.tier) == 1
    assert sharing.tier.num_bytes == 100 * model.layout.bytes_per_token


async def test_a_donor_in_use_is_not_evicted(model: EmbeddedModel) -> None:
    """While a request holds its donors, room is made elsewhere or not at all."""
    bytes_per_token = model.layout.bytes_per_token
    sharing = sharing_with(FixedNominator(), model, max_bytes=250 * bytes_per_token)
    wanted = prompt(100)
    donor = donor_for(sharing, model, wanted.token_ids)
    lookup = await look_up(sharing, wanted)
    keeper_of(sharing).hold(lookup.plan)
    assert store(sharing, model, prompt(200, seed=1).token_ids) is None
    keeper_of(sharing).release(lookup.plan)
    assert sharing.tree.node(donor.node_id).num_tokens == 100
    assert store(sharing, model, prompt(200, seed=1).token_ids) is not None
    assert sharing.tree.node(donor.node_id).num_tokens <= 50


async def test_a_sequence_on_an_evicted_donor_is_not_stored(model: EmbeddedModel) -> None:
    """An administrator may evict a donor while a recipient runs: that recipient is just not kept."""
    sharing = sharing_with(FixedNominator(), model)
    donor, wanted = donor_and_edit(sharing, model)
    lookup = await look_up(sharing, wanted)
    sharing.tier.drop(sharing.tree.evict(donor.node_id).freed_segments)
    assert store(sharing, model, wanted.token_ids, plan=lookup.plan) is None
    assert sharing.tree.stats().num_nodes == 0
    assert sharing.tier.num_bytes == 0
    assert fallbacks(sharing) == {(Component.STORE, FallbackReason.DONOR_GONE): 1}


@pytest.mark.parametrize("family", ["llama", "mistral-window"])
async def test_an_exact_prefix_of_an_evicted_donor_is_retained_only_where_all_of_it_was_written(
    family: str,
) -> None:
    """Layers with a window lack what nobody was going to see; the rest of their slots is no KV."""
    model = EmbeddedModel(tiny_model(family), name=family)
    sharing = sharing_with(FixedNominator(), model)
    base = prompt(200)
    donor = donor_for(sharing, model, base.token_ids)
    wanted = token_ids(np.concatenate([base.token_ids[:150], prompt(50, seed=3).token_ids]))
    lookup = await look_up(sharing, Prompt(wanted, TEXT))
    assert isinstance(lookup.plan, Plan)
    assert lookup.plan.exact_length == 150
    kv = model.new_sequence(200)
    for plane in kv.planes:
        plane.fill_(float("nan"))
    kv.write_copies(lookup.plan.copies, lookup.segments, computed=lookup.plan.may_compute)
    model.compute(PartialPass(kv, (Span(150, 200),)), wanted[150:])
    sharing.tier.drop(sharing.tree.evict(donor.node_id).freed_segments)
    node = keeper_of(sharing).store(Computed("ns", wanted, lookup.plan, kv))
    if family == "llama":
        assert node is not None
        assert not kv.k[:, :200].isnan().any()
    else:
        assert node is None
        assert fallbacks(sharing) == {(Component.STORE, FallbackReason.DONOR_GONE): 1}


async def test_nobody_is_evicted_for_a_prompt_that_would_not_fit_anyway(model: EmbeddedModel) -> None:
    """With most of the memory pinned, a large prompt is refused and the small ones stay."""
    bytes_per_token = model.layout.bytes_per_token
    sharing = sharing_with(FixedNominator(), model, max_bytes=300 * bytes_per_token)
    pinned = store(sharing, model, prompt(200, seed=1).token_ids)
    small = store(sharing, model, prompt(50, seed=2).token_ids)
    assert pinned is not None
    assert small is not None
    sharing.tree.pin(pinned.node_id)
    assert store(sharing, model, prompt(150, seed=3).token_ids) is None
    assert sharing.tree.get(small.node_id) is not None
    assert fallbacks(sharing) == {(Component.STORE, FallbackReason.NO_ROOM): 1}


async def test_exact_kv_is_kept_though_its_donor_is_gone(model: EmbeddedModel) -> None:
    """A prefix taken from an evicted donor is in the slots, and exact: the prompt is stored whole."""
    sharing = sharing_with(FixedNominator(), model)
    base = prompt(100)
    donor = donor_for(sharing, model, base.token_ids)
    longer = token_ids(np.concatenate([base.token_ids, prompt(50, seed=1).token_ids]))
    lookup = await look_up(sharing, Prompt(longer, TEXT))
    assert isinstance(lookup.plan, Plan)
    assert lookup.plan.decision == "exact"
    sharing.tier.drop(sharing.tree.evict(donor.node_id).freed_segments)
    node = store(sharing, model, longer, plan=lookup.plan)
    assert node is not None
    assert node.exact_length == 150
    assert sharing.tier.num_bytes == 150 * model.layout.bytes_per_token
