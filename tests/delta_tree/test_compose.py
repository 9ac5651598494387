"""Which copies a prompt is composed of, by examples."""

from dataclasses import replace

import pytest

from delta_tree import (
    Node,
    NodeId,
    Piece,
    PieceTable,
    Span,
    compose,
    token_ids,
)
from tests.delta_tree.fake_prompts import NAMESPACE
from tests.delta_tree.stored_prompts import StoredPrompts

DOCUMENTS = [list(range(start, start + 50)) for start in range(1000, 6000, 1000)]
SYSTEM = list(range(30))


def test_a_known_prompt_is_one_exact_copy() -> None:
    """A prompt that is stored whole needs nothing computed."""
    prompts = StoredPrompts()
    prompts.add(DOCUMENTS[0])
    made = prompts.compose(DOCUMENTS[0])
    assert (made.exact_length, len(made.copies), made.gaps) == (50, 1, ())


def test_a_form_leaves_its_slots_open() -> None:
    """Another filling of a form copies all but the slots, at the same positions."""
    prompts = StoredPrompts()
    form = [*SYSTEM, 901, *DOCUMENTS[0], 902, *DOCUMENTS[1]]
    prompts.add(form)
    target = [*SYSTEM, 911, *DOCUMENTS[0], 912, *DOCUMENTS[1]]
    made = prompts.compose(target)
    assert made.gaps == (Span(30, 31), Span(81, 82))
    assert {copy.shift for copy in made.copies} == {0}
    assert made.exact_length == 30


def test_documents_come_from_several_donors() -> None:
    """A RAG prompt takes each document from a donor that has it, wherever it stands there."""
    prompts = StoredPrompts()
    prompts.add([*SYSTEM, *DOCUMENTS[0], *DOCUMENTS[1]])
    prompts.add([*SYSTEM, *DOCUMENTS[2], *DOCUMENTS[3]])
    made = prompts.compose([*SYSTEM, *DOCUMENTS[3], 7, *DOCUMENTS[1], *DOCUMENTS[2], *DOCUMENTS[0]])
    assert made.gaps == (Span(80, 81),)
    assert made.donors == (NodeId(1), NodeId(2))
    assert made.reasons == ("used", "used")


def test_only_so_many_donors_are_mixed() -> None:
    """Past `max_donors` a donor that could help is left out, and says why."""
    prompts = StoredPrompts()
    for document in DOCUMENTS[:3]:
        prompts.add([*SYSTEM, 900, *document])
    target = [*SYSTEM, *DOCUMENTS[0], *DOCUMENTS[1], *DOCUMENTS[2]]
    made = prompts.compose(target, max_donors=2)
    assert made.reasons == ("used", "used", "max_donors")
    assert made.num_copied == 30 + 100
    assert prompts.compose(target, max_donors=0).num_copied == 30


def test_reasons_tell_why_a_candidate_was_not_used() -> None:
    """Each candidate's reason names what kept it out."""
    prompts = StoredPrompts()
    prompts.add([*DOCUMENTS[0], *DOCUMENTS[1]])
    prompts.add(DOCUMENTS[1])
    prompts.add(DOCUMENTS[2])
    prompts.add(DOCUMENTS[0], generations=[5])
    missing = prompts.add(DOCUMENTS[0])
    for segment_id in missing.pieces.segment_ids:
        del prompts.segments[segment_id]
    prompts.add(DOCUMENTS[0], namespace="tenant-b")  # segments of another namespace than the node
    made = prompts.compose([*DOCUMENTS[0], *DOCUMENTS[1]], max_generation=4)
    assert made.reasons == (
        "used",
        "nothing_left",
        "below_min_run",
        "generation",
        "missing_segment",
        "missing_segment",
    )


def test_without_approximate_copies_only_the_exact_prefix_is_used() -> None:
    """Where sharing must be exact, nothing after the first difference is copied."""
    prompts = StoredPrompts()
    prompts.add([*SYSTEM, 1, *DOCUMENTS[0]])
    prompts.add(DOCUMENTS[0])
    made = prompts.compose([*SYSTEM, 2, *DOCUMENTS[0]], allow_approximate=False)
    assert made.gaps == (Span(30, 81),)
    assert [copy.target for copy in made.copies] == [Span(0, 30)]
    assert made.reasons == ("used", "exact_only")
    assert made.withheld


def test_nothing_is_withheld_where_only_the_prefix_is_in_common() -> None:
    """Approximate copies would take nothing from such donors, so they are not left out for that."""
    prompts = StoredPrompts()
    prompts.add([*SYSTEM, 1, *DOCUMENTS[0]])
    prompts.add(DOCUMENTS[2])
    made = prompts.compose([*SYSTEM, 2, *DOCUMENTS[1]], allow_approximate=False)
    assert made.reasons == ("used", "below_min_run")
    assert not made.withheld


def test_exactness_ends_where_the_donors_does() -> None:
    """Equal tokens beyond the donor's exact length are approximate copies."""
    prompts = StoredPrompts()
    prompts.add([*DOCUMENTS[0], *DOCUMENTS[1]], generations=[0, 1])
    made = prompts.compose([*DOCUMENTS[0], *DOCUMENTS[1]])
    assert made.exact_length == 50
    assert [copy.target for copy in made.copies] == [Span(0, 50), Span(50, 100)]


def test_the_exact_prefix_may_come_from_one_more_donor() -> None:
    """The longest exact prefix is taken although another donor fills the rest."""
    prompts = StoredPrompts()
    prompts.add([*SYSTEM, 5, *DOCUMENTS[0]])
    prompts.add([*SYSTEM, 6, *DOCUMENTS[4]])
    made = prompts.compose([*SYSTEM, 6, 7, *DOCUMENTS[0]], max_donors=1)
    assert (made.exact_length, made.gaps) == (31, (Span(31, 32),))


def test_the_exact_prefix_comes_from_the_best_donor_if_it_has_it() -> None:
    """Of several holders of the exact prefix, the one that fills the rest gives it, too."""
    prompts = StoredPrompts()
    prompts.add([*SYSTEM, 5, *DOCUMENTS[1]])
    prompts.add([*SYSTEM, 6, *DOCUMENTS[0]])
    assert prompts.compose([*SYSTEM, 7, *DOCUMENTS[0]]).donors == (NodeId(2),)


def test_among_equal_runs_the_least_moved_is_taken() -> None:
    """Of two donors with the same text, the one that has it at the same position is used."""
    prompts = StoredPrompts()
    prompts.add([*DOCUMENTS[4], *DOCUMENTS[0], *DOCUMENTS[1]])
    prompts.add([*range(60, 90), *DOCUMENTS[2]])
    prompts.add([*range(200, 210), *range(220, 240), *DOCUMENTS[2]])
    prompts.add(DOCUMENTS[2])
    made = prompts.compose([*range(400, 430), *DOCUMENTS[2], 5, *DOCUMENTS[0], *DOCUMENTS[1]])
    filled = next(copy for copy in made.copies if copy.target_start == 30)
    assert (filled.donor, filled.shift) == (NodeId(2), 0)


def test_among_equally_moved_runs_the_context_decides() -> None:
    """Of two donors with a text at the same place, the one with equal text before it is used."""
    prompts = StoredPrompts()
    before = list(range(700, 708))
    prompts.add([*DOCUMENTS[3][:22], *range(600, 608), *DOCUMENTS[0], 1])
    prompts.add([*DOCUMENTS[4][:22], *before, *DOCUMENTS[0], 2])
    prompts.add([*range(30), *range(800, 850), *DOCUMENTS[1], *DOCUMENTS[2]])
    target = [*range(22), *before, *DOCUMENTS[0], *DOCUMENTS[1], *DOCUMENTS[2]]
    made = prompts.compose(target)
    assert next(copy.donor for copy in made.copies if copy.target.end == 80) == NodeId(2)


def test_a_lower_generation_is_preferred() -> None:
    """Of two donors that are equal in all else, the fresher KV is used."""
    prompts = StoredPrompts()
    prompts.add([9, *DOCUMENTS[0]], generations=[2])
    prompts.add([9, *DOCUMENTS[0]], generations=[1])
    prompts.add([*range(51), *DOCUMENTS[1], *DOCUMENTS[2]])
    made = prompts.compose([8, *DOCUMENTS[0], *DOCUMENTS[1], *DOCUMENTS[2]])
    assert next(copy.donor for copy in made.copies if copy.target_start == 1) == NodeId(2)


def test_the_shift_is_measured_from_where_the_kv_was_computed() -> None:
    """A text that was itself moved into its donor is copied from, and counted from, its origin."""
    prompts = StoredPrompts()
    origin = prompts.add([*SYSTEM, *DOCUMENTS[0]])
    (piece,) = origin.pieces
    moved = Node(
        node_id=NodeId(2),
        namespace=NAMESPACE,
        token_ids=token_ids(DOCUMENTS[0]),
        pieces=PieceTable([Piece(piece.segment_id, 30, 50)]),
        exact_length=0,
        deviation=0.0,
        created_at=0.0,
        last_used_at=0.0,
        num_hits=0,
        pinned=False,
    )
    prompts.nodes = [moved]
    (copy,) = prompts.compose([1, 2, *DOCUMENTS[0]]).copies
    assert (copy.source_position, copy.target_start, copy.shift) == (30, 2, -28)


@pytest.mark.parametrize("target", [[], [5], [5] * 300, [1, 2, 3] * 100, list(range(9000, 9300))])
def test_adversarial_targets(target: list[int]) -> None:
    """Empty, tiny, constant, periodic and foreign prompts are composed without surprise."""
    prompts = StoredPrompts()
    prompts.add([5] * 200)
    prompts.add([2, 3, 1] * 90, generations=[0, 1, 2])
    prompts.compose(target)


def test_min_run_of_a_composition_must_be_positive() -> None:
    """A run of no tokens is no run."""
    with pytest.raises(ValueError, match="min_run"):
        StoredPrompts().compose([1], min_run=0)


def test_without_reasons_a_composition_is_the_same() -> None:
    """Only what they take is saved."""
    prompts = StoredPrompts()
    for start in (0, 40, 70):
        prompts.add(list(range(start, start + 60)))
    target = token_ids([*range(20, 100), *range(500, 520)])
    told, untold = (
        compose(
            target,
            prompts.nodes,
            prompts.segments.__getitem__,
            min_run=8,
            max_donors=2,
            max_generation=1,
            allow_approximate=True,
            gives_reasons=gives_reasons,
        )
        for gives_reasons in (True, False)
    )
    assert told.copies
    assert untold == replace(told, reasons=())
