"""Plans of prompts with media: each is copied as a whole, or ends what is copied."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_tree import DeltaTree, Node, Span, TokenIds, token_ids
from kvshare.settings import load_settings
from kvshare.sharing.limits import PlannerLimits
from kvshare.sharing.media import outside_media
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.sharing.planner import make_plan
from tests.kvshare.sharing.prompts import RATES, prompt, stored
from tests.kvshare.sharing.test_planner import assert_covers_once

SETTINGS = load_settings()
LIMITS = PlannerLimits(
    sharing=SETTINGS.sharing.model_copy(update={"max_risk": 1.0, "max_deviation": 10.0}),
    repair=SETTINGS.repair,
    can_probe=True,  # where it may not be used
)


def plan_for(tree: DeltaTree, tokens: TokenIds, media: tuple[Span, ...], *nodes: Node) -> Plan | NoPlan:
    return make_plan(tokens, nodes, tree.segment, approximate=True, limits=LIMITS, rates=RATES, media=media)


def joined(*parts: TokenIds) -> TokenIds:
    return token_ids(np.concatenate(parts))


def assert_media_are_whole(plan: Plan, media: tuple[Span, ...]) -> None:
    """No placeholder that comes before a copy lies in a medium."""
    last = max((copy.target_end for copy in plan.copies), default=0)
    for span in plan.placeholders:
        if span.end <= last:
            assert not any(span.intersection(medium) for medium in media)


def test_an_image_right_behind_an_edit_is_not_repaired(tree: DeltaTree) -> None:
    """The window after the edit would lie in it; what is behind the image is repaired."""
    image, after = prompt(100, seed=2), prompt(400, seed=3)
    donor = stored(tree, joined(prompt(100, seed=1), image, after))
    tokens = joined(prompt(90, seed=1), prompt(10, seed=9), image, after)
    media = (Span(100, 200),)
    plan, without = plan_for(tree, tokens, media, donor), plan_for(tree, tokens, (), donor)
    assert isinstance(plan, Plan)
    assert isinstance(without, Plan)
    assert any(span.intersection(media[0]) for span in without.placeholders)
    assert_covers_once(plan)
    assert_media_are_whole(plan, media)
    assert plan.order is None
    assert plan.copies[-1].target_end > 200


def test_another_image_ends_what_is_copied(tree: DeltaTree) -> None:
    """The engine computes it, and all that is behind it."""
    before, after = prompt(300, seed=1), prompt(400, seed=3)
    donor = stored(tree, joined(before, prompt(100, seed=2), after))
    tokens = joined(before, prompt(100, seed=4), after)
    plan = plan_for(tree, tokens, (Span(300, 400),), donor)
    assert isinstance(plan, Plan)
    assert (plan.decision, plan.exact_length) == ("exact", 300)


def test_an_image_of_which_a_part_is_equal_is_computed(tree: DeltaTree) -> None:
    """The exact prefix ends in front of it."""
    before, image, after = prompt(300, seed=1), prompt(100, seed=2), prompt(400, seed=3)
    donor = stored(tree, joined(before, image[:60], prompt(40, seed=8), after))
    plan = plan_for(tree, joined(before, image, after), (Span(300, 400),), donor)
    assert isinstance(plan, Plan)
    assert plan.exact_length == 300
    assert plan.copies[-1].target_end == 300


def test_an_image_at_the_end_of_the_prompt(tree: DeltaTree) -> None:
    """Its last token is the prompt's, which is always computed: by the engine, with the image."""
    before, image = prompt(300, seed=1), prompt(100, seed=2)
    donor = stored(tree, joined(prompt(300, seed=1), image, prompt(50, seed=5)))
    for beginning in (before, joined(prompt(7, seed=6), before)):
        tokens = joined(beginning, image)
        media = (Span(len(beginning), len(tokens)),)
        plan = plan_for(tree, tokens, media, donor)
        assert isinstance(plan, Plan)
        assert_covers_once(plan)
        assert_media_are_whole(plan, media)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_edit_keeps_media_whole(data: st.DataObject) -> None:
    """Of prompts with texts and images in any order, some of them replaced, left out or added."""
    parts = [
        prompt(data.draw(st.integers(20, 160)), seed=number) for number in range(data.draw(st.integers(2, 6)))
    ]
    is_image = [data.draw(st.booleans()) for _ in parts]
    kept: list[tuple[TokenIds, bool]] = []
    for number, (part, image) in enumerate(zip(parts, is_image, strict=True)):
        change = data.draw(st.sampled_from(["keep", "keep", "replace", "drop", "add"]))
        if change == "add":
            kept.append((prompt(data.draw(st.integers(1, 30)), seed=200 + number), False))
        if change != "drop":
            new = change == "replace"
            kept.append((prompt(len(part), seed=100 + number) if new else part, image))
    if sum(len(part) for part, _ in kept) < 40:
        return
    media, at = [], 0
    for part, image in kept:
        if image:
            media.append(Span(at, at + len(part)))
        at += len(part)
    tree = DeltaTree.open(None, identity="test")
    donor = stored(tree, joined(*parts))
    plan = plan_for(tree, joined(*(part for part, _ in kept)), tuple(media), donor)
    if isinstance(plan, Plan):
        assert_covers_once(plan)
        assert_media_are_whole(plan, tuple(media))
        assert plan.placeholders[-1].end == plan.num_tokens


@pytest.mark.parametrize(
    ("spans", "rest"),
    [
        ((Span(0, 10),), (Span(0, 10),)),
        ((Span(15, 25),), (Span(15, 20),)),
        ((Span(22, 28),), ()),
        ((Span(10, 60),), (Span(10, 20), Span(30, 40), Span(50, 60))),
        ((Span(5, 8), Span(29, 33)), (Span(5, 8), Span(30, 33))),
    ],
)
def test_repairs_leave_media_out(spans: tuple[Span, ...], rest: tuple[Span, ...]) -> None:
    assert outside_media(spans, (Span(20, 30), Span(40, 50))) == rest
