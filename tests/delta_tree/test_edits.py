"""Edit scripts as values."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_tree import Edit, EditRangeError, EditScript, Match, Op, Span, align, token_ids
from tests.delta_tree.fake_prompts import ADVERSARIAL, edited_pairs

FORM = Edit(Op.KEEP, Span(0, 3), Span(0, 3))
SWAP = Edit(Op.REPLACE, Span(3, 5), Span(3, 4), (9,))


@given(edited_pairs(), st.integers(1, 8))
def test_apply_gives_the_target(pair: tuple[list[int], list[int]], min_run: int) -> None:
    """A script from a to b applied to a is b."""
    source, target = map(token_ids, pair)
    script = align(source, target, min_run=min_run)
    assert script.apply(source).tolist() == pair[1]
    assert (script.source_length, script.target_length) == (len(source), len(target))
    assert script.num_kept == sum(keep.length for keep in script.keeps)


@given(edited_pairs())
def test_a_script_is_its_edits(pair: tuple[list[int], list[int]]) -> None:
    """Edits say all there is to a script."""
    script = align(token_ids(pair[0]), token_ids(pair[1]), min_run=2)
    again = EditScript(len(pair[0]), script.edits)
    assert again == script
    assert hash(again) == hash(script)


@pytest.mark.parametrize("name", ADVERSARIAL)
@pytest.mark.parametrize("min_run", [1, 3, 16])
def test_adversarial_pairs_round_trip(name: str, min_run: int) -> None:
    """Degenerate and repetitive prompts are aligned as faithfully as any."""
    source, target = (token_ids(ids) for ids in ADVERSARIAL[name])
    script = align(source, target, min_run=min_run)
    assert script.apply(source).tolist() == ADVERSARIAL[name][1]


def test_edits_are_decoded_as_given() -> None:
    """The edits of a script are those it was made of, spans and tokens included."""
    grow = Edit(Op.INSERT, Span(5, 5), Span(4, 6), (1, 2))
    drop = Edit(Op.DELETE, Span(5, 7), Span(6, 6))
    script = EditScript(7, (FORM, SWAP, grow, drop))
    assert script.edits == (FORM, SWAP, grow, drop)
    assert script.keeps == (Match(0, 0, 3),)
    assert script.apply(token_ids([0, 1, 2, 3, 4, 5, 6])).tolist() == [0, 1, 2, 9, 1, 2]


def test_scripts_compare_by_their_edits() -> None:
    """Equal edits make equal scripts, other edits other ones."""
    assert EditScript(5, (FORM, SWAP)) == EditScript(5, (FORM, SWAP))
    other = Edit(Op.REPLACE, Span(3, 5), Span(3, 4), (8,))
    assert EditScript(5, (FORM, SWAP)) != EditScript(5, (FORM, other))


def test_repr_shows_no_tokens() -> None:
    """What ends up in a log says how much, not what."""
    script = EditScript(1, (Edit(Op.REPLACE, Span(0, 1), Span(0, 1), (123456,)),))
    assert repr(script) == "EditScript(1 -> 1 tokens, 0 kept, 1 edits)"


@pytest.mark.parametrize(
    "edits",
    [
        [FORM],
        [SWAP],
        [FORM, FORM],
        [FORM, Edit(Op.DELETE, Span(3, 5), Span(4, 4))],
        [FORM, SWAP, Edit(Op.DELETE, Span(5, 6), Span(4, 4))],
    ],
)
def test_scripts_with_holes_are_refused(edits: list[Edit]) -> None:
    """Edits cover the source and the target from left to right, and end where it ends."""
    with pytest.raises(EditRangeError):
        EditScript(5, tuple(edits))


@pytest.mark.parametrize(
    ("op", "source", "target", "new"),
    [
        (Op.KEEP, Span(0, 2), Span(0, 3), ()),
        (Op.KEEP, Span(0, 0), Span(0, 0), ()),
        (Op.KEEP, Span(0, 1), Span(0, 1), (4,)),
        (Op.INSERT, Span(0, 1), Span(0, 1), (4,)),
        (Op.INSERT, Span(0, 0), Span(0, 2), (4,)),
        (Op.REPLACE, Span(0, 1), Span(0, 0), ()),
        (Op.DELETE, Span(0, 1), Span(0, 1), ()),
    ],
)
def test_impossible_edits_are_refused(op: Op, source: Span, target: Span, new: tuple[int, ...]) -> None:
    """Each operation allows only its own shape of spans and tokens."""
    with pytest.raises(EditRangeError):
        Edit(op, source, target, new)


def test_a_script_refuses_another_source() -> None:
    """Applying checks the length it was made for."""
    script = EditScript(5, (FORM, SWAP))
    with pytest.raises(EditRangeError, match="for 5 source tokens, got 4"):
        script.apply(token_ids([1, 2, 3, 4]))


def test_keeps_must_be_in_order() -> None:
    """A script cannot be built from matches that cross or overlap."""
    with pytest.raises(EditRangeError):
        EditScript.from_keeps(9, token_ids([1] * 9), [Match(4, 0, 3), Match(0, 4, 3)])
