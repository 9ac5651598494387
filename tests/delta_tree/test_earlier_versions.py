"""Stores that earlier versions wrote: they are read, and written anew."""

from dataclasses import replace
from pathlib import Path

import pytest

from delta_tree import (
    UNKNOWN_DEVIATION,
    DeltaTree,
    StoreCorruptError,
)
from tests.delta_tree.fake_prompts import fresh_draft
from tests.delta_tree.stores import IDENTITY, content, edit, write_earlier


def test_a_store_of_version_1_is_read(old: Path) -> None:
    """Prompts, their places, pieces, pins and counters are there; looking changes no byte."""
    before = old.read_bytes()
    with DeltaTree.open(old, identity=IDENTITY, read_only=True) as tree:
        assert [node.node_id for node in tree.nodes()] == [1, 2, 3, 4, 5]
        assert [tree.ancestors(node.node_id) for node in tree.nodes()] == [(), (1,), (1,), (2, 1), ()]
        assert [node.num_tokens for node in tree.nodes()] == [40, 32, 21, 34, 3]
        assert [node.num_hits for node in tree.nodes()] == [0, 0, 0, 1, 0]
        assert tree.pinned() == {3}
        assert {node.node_id: len(node.pieces) for node in tree.nodes()} == {1: 1, 2: 2, 3: 2, 4: 3, 5: 1}
    assert old.read_bytes() == before


def test_a_store_of_version_1_becomes_one_of_this_version(old: Path) -> None:
    """Opened to be changed it is written anew, and can be changed and opened again."""
    with DeltaTree.open(old, identity=IDENTITY, read_only=True) as tree:
        before = content(tree)
    with DeltaTree.open(old, identity=IDENTITY) as tree:
        assert content(tree) == before
    with DeltaTree.open(old, identity=IDENTITY) as tree:
        assert content(tree) == before
        tree.evict(tree.nodes()[1].node_id)
        assert tree.insert(fresh_draft([1, 2])).created
        before = content(tree)
    with DeltaTree.open(old, identity=IDENTITY) as tree:
        assert content(tree) == before


def test_a_damaged_store_of_version_1_is_left_as_it_is(old: Path) -> None:
    """What does not fit together is refused, not written anew."""
    edit(old, "UPDATE pieces SET start = start + 1 WHERE node_id = 4")
    before = old.read_bytes()
    with pytest.raises(StoreCorruptError, match="checksum"):
        DeltaTree.open(old, identity=IDENTITY)
    assert old.read_bytes() == before


def test_a_store_of_version_2_is_read_and_written_anew(path: Path) -> None:
    """Exact nodes stay exact; the others have an unknown deviation until they are computed again."""
    write_earlier(path, 2)
    with DeltaTree.open(path, identity=IDENTITY, read_only=True) as tree:
        *whole, edited = tree.nodes()
        assert len(whole) == 5
        is_exact = {node.node_id: node.exact_length == node.num_tokens for node in tree.nodes()}
        assert {True, False} == set(is_exact.values())
        for node in tree.nodes():
            assert node.deviation == (0.0 if is_exact[node.node_id] else UNKNOWN_DEVIATION)
        assert (edited.exact_length, edited.num_tokens) == (3, 5)
        assert tree.ancestors(edited.node_id) == (whole[-1].node_id,)
        before = content(tree)
    for _ in range(2):
        with DeltaTree.open(path, identity=IDENTITY) as tree:
            assert content(tree) == before


def test_a_store_of_version_3_has_sums_of_deviations(path: Path) -> None:
    """It knew the largest of as many deviations as there are generations: their sum is at most so many."""
    with DeltaTree.open(path, identity=IDENTITY) as tree:
        of_generation = {}
        for generation in (0, 1, 3):
            draft = fresh_draft([generation, 8, 9])
            if generation:
                segments = tuple(replace(each, generation=generation) for each in draft.new_segments)
                draft = replace(draft, new_segments=segments, exact_length=0, deviation=0.01)
            of_generation[generation] = tree.insert(draft).node.node_id
    edit(path, "PRAGMA user_version = 3")
    for _ in range(2):  # read as an earlier version, then as this one
        with DeltaTree.open(path, identity=IDENTITY) as tree:
            found = {key: tree.node(node_id).deviation for key, node_id in of_generation.items()}
            assert found == {0: 0.0, 1: 0.01, 3: pytest.approx(0.03)}
