"""Compositions against brute force, over random stored prompts."""

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from delta_tree import Composition, Node, Target, TokenIds, compose, token_ids
from tests.delta_tree.fake_prompts import tokens
from tests.delta_tree.stored_prompts import StoredPrompts


def usable_ids(prompts: StoredPrompts, node: Node, max_generation: int) -> list[int]:
    """The node's tokens, those without usable KV as -1."""
    return [
        prompts.stored[piece.segment_id, piece.offset + i]
        if prompts.segments[piece.segment_id].generation <= max_generation
        else -1
        for piece in node.pieces
        for i in range(piece.length)
    ]


@given(st.data())
@settings(max_examples=150)
def test_compositions_against_brute_force(data: st.DataObject) -> None:
    """The exact prefix is the longest there is, and no gap holds a run that a donor could fill."""
    prompts = StoredPrompts()
    for _ in range(data.draw(st.integers(0, 4))):
        generations = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3))
        prompts.add(data.draw(tokens(25, 2, min_size=1)), generations)
    target = data.draw(tokens(30, 2))
    if bool(prompts.nodes) and data.draw(st.booleans()):
        known = data.draw(st.sampled_from(prompts.nodes)).token_ids.tolist()
        target = known[: data.draw(st.integers(0, len(known)))] + target
    min_run = data.draw(st.integers(1, 6))
    made = prompts.compose(target, min_run=min_run, max_donors=9, max_generation=1)

    def exact_prefix(node: Node) -> int:
        pairs = zip(node.token_ids.tolist()[: node.exact_length], target, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(node.exact_length, len(target)))

    assert made.exact_length == max(map(exact_prefix, prompts.nodes), default=0)
    known_runs = {
        tuple(ids[i : i + min_run])
        for ids in (usable_ids(prompts, node, 1) for node in prompts.nodes)
        for i in range(len(ids) - min_run + 1)
    }
    for gap in made.gaps:
        for start in range(gap.start, gap.end - min_run + 1):
            assert tuple(target[start : start + min_run]) not in known_runs


@given(st.data())
def test_what_must_not_move_is_put_where_it_stood_and_nothing_of_that_is_missed(data: st.DataObject) -> None:
    """Against every donor, position by position."""
    prompts = StoredPrompts()
    for _ in range(data.draw(st.integers(1, 4))):
        prompts.add(data.draw(tokens(25, 2, min_size=1)))
    target = data.draw(tokens(30, 2))
    min_run = data.draw(st.integers(1, 6))
    made = prompts.compose(target, min_run=min_run, max_donors=9, may_move=False)
    assert all(copy.shift == 0 for copy in made.copies)
    for gap in made.gaps:
        for start in range(gap.start, gap.end - min_run + 1):
            wanted = target[start : start + min_run]
            for node in prompts.nodes:
                assert node.token_ids[start : start + min_run].tolist() != wanted


@given(st.data())
def test_composing_is_deterministic(data: st.DataObject) -> None:
    """The same prompt over the same candidates is composed the same way."""
    prompts = StoredPrompts()
    for _ in range(3):
        prompts.add(data.draw(tokens(25, 1, min_size=1)))
    target = data.draw(tokens(30, 1))
    assert prompts.compose(target, min_run=3) == prompts.compose(target, min_run=3)


@given(st.data())
@settings(max_examples=150)
def test_what_earlier_compositions_found_changes_no_later_one(data: st.DataObject) -> None:
    """With all candidates, with fewer donors, without moving KV, and with beginnings of the candidates."""
    prompts = StoredPrompts()
    for _ in range(data.draw(st.integers(1, 4))):
        generations = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3))
        prompts.add(data.draw(tokens(25, 2, min_size=1)), generations)
    ids = token_ids(data.draw(tokens(30, 2)))
    min_run = data.draw(st.integers(1, 6))
    beginnings = [
        replace(
            node, token_ids=node.token_ids[:length], pieces=node.pieces.first(length), exact_length=length
        )
        for node in prompts.nodes
        if (length := node.exact_length)
    ]
    known = Target(ids, min_run=min_run)

    def composed(
        target: TokenIds | Target, nodes: Sequence[Node], max_donors: int, may_move: bool
    ) -> Composition:
        return compose(
            target,
            nodes,
            prompts.segment_of,
            min_run=min_run,
            max_donors=max_donors,
            max_generation=1,
            allow_approximate=True,
            may_move=may_move,
        )

    for nodes in (prompts.nodes, beginnings, prompts.nodes):
        for max_donors, may_move in ((9, True), (1, True), (9, False)):
            assert composed(known, nodes, max_donors, may_move) == composed(ids, nodes, max_donors, may_move)
