"""A prompt is stored when it is prefilled, its answer when that has ended: one node in the end."""

from __future__ import annotations

from pathlib import Path

import pytest

from delta_tree import (
    MetadataStoreError,
    Node,
    new_segment_id,
)
from kvshare.fleet.replica_keeper import ReplicaKeeper
from kvshare.telemetry import Component, FallbackReason
from kvshare.vllm_protocol.messages import FinishedReport, Prefilled, StoredSegment
from tests.kvshare.fleet.reports import offer, prompt, request


def in_two(num_prompt: int, num_tokens: int) -> tuple[StoredSegment, StoredSegment]:
    """A prompt's segment and its answer's, as the connector keeps them."""
    return (
        StoredSegment(new_segment_id(), 0, num_prompt, num_prompt * 10),
        StoredSegment(new_segment_id(), num_prompt, num_tokens - num_prompt, (num_tokens - num_prompt) * 10),
    )


def test_a_prompt_and_its_answer_become_one_node(keeper: ReplicaKeeper) -> None:
    parts = in_two(50, 60)
    finished = FinishedReport("r", "full", None, stored=parts, output_ids=tuple(range(10)))
    node = offer(keeper, finished, prompt(1))
    assert node is not None
    assert (node.num_tokens, node.exact_length) == (60, 60)
    assert keeper.tier.memories["a"].num_bytes == 600


def test_a_store_that_cannot_take_the_answer_keeps_the_prompt(
    keeper: ReplicaKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the replica drops the answer's segment; the prompt can be indexed."""

    def refuse(*_: object) -> Node:
        raise MetadataStoreError(Path("tree"), "the disk is full")

    monkeypatch.setattr(keeper.tree, "lengthen", refuse)
    parts = in_two(50, 60)
    finished = FinishedReport("r", "full", None, stored=parts, output_ids=tuple(range(10)))
    node = offer(keeper, finished, prompt(1))
    assert node is not None
    assert node.num_tokens == 50
    assert keeper.tier.take_dropped("a") == [parts[1].segment_id]
    assert keeper.telemetry.counts().fallbacks == {(Component.STORE, FallbackReason.REFUSED): 1}


class TestPrompts:
    """A prompt that is kept before its answer is."""

    def reports(self, *, length: int = 50) -> tuple[Prefilled, FinishedReport]:
        prompt, answer = in_two(length, length + 10)
        finished = FinishedReport("r", "full", None, stored=(prompt, answer), output_ids=tuple(range(10)))
        return Prefilled("r", (), (prompt,)), finished

    def test_it_is_a_node_and_gets_its_answer(self, keeper: ReplicaKeeper) -> None:
        """One node, which others find already."""
        keeper.tier.memories["a"].max_bytes = 10**6
        prefilled, finished = self.reports()
        asked = request(prompt(1))
        node = keeper.store_prompt(asked, prefilled, ())
        assert node is not None
        assert node.num_tokens == 50
        whole = keeper.store(asked, finished, ())
        assert whole is not None
        assert (whole.node_id, whole.num_tokens) == (node.node_id, 60)
        assert keeper.tier.memories["a"].num_bytes == 600

    def test_one_that_is_too_short_waits_for_its_answer(self, keeper: ReplicaKeeper) -> None:
        """Together they are long enough; its segment is not dropped meanwhile."""
        keeper.tier.memories["a"].max_bytes = 10**6
        prefilled, finished = self.reports(length=5)
        asked = request(prompt(1, length=5))
        assert keeper.store_prompt(asked, prefilled, ()) is None
        assert keeper.tier.take_dropped("a") == []
        node = keeper.store(asked, finished, ())
        assert node is not None
        assert node.num_tokens == 15

    def test_what_is_refused_is_refused_with_its_answer(self, keeper: ReplicaKeeper) -> None:
        """All of its segments are dropped over there."""
        keeper.tier.memories["a"].max_bytes = 100
        prefilled, finished = self.reports()
        asked = request(prompt(1))
        assert keeper.store_prompt(asked, prefilled, ()) is None
        keeper.tier.memories["a"].max_bytes = 10**6
        assert keeper.store(asked, finished, ()) is None
        assert set(keeper.tier.take_dropped("a")) == {entry.segment_id for entry in finished.stored}
        assert not keeper.tree.nodes()

    def test_one_that_left_meanwhile_takes_its_answer_along(self, keeper: ReplicaKeeper) -> None:
        """Nothing is left over at the replica."""
        keeper.tier.memories["a"].max_bytes = 10**6
        prefilled, finished = self.reports()
        asked = request(prompt(1))
        assert keeper.store_prompt(asked, prefilled, ()) is not None
        keeper.forget([prefilled.stored[0].segment_id])
        assert keeper.store(asked, finished, ()) is None
        assert keeper.tier.take_dropped("a") == [entry.segment_id for entry in finished.stored]
        assert not keeper.tree.nodes()

    def test_an_answer_that_is_not_kept_leaves_the_prompt(self, keeper: ReplicaKeeper) -> None:
        """The end may report the prompt alone."""
        keeper.tier.memories["a"].max_bytes = 10**6
        prefilled, _ = self.reports()
        asked = request(prompt(1))
        node = keeper.store_prompt(asked, prefilled, ())
        assert node is not None
        end = FinishedReport("r", "full", "save_failed", stored=prefilled.stored)
        assert keeper.store(asked, end, ()) == node
        assert keeper.tier.take_dropped("a") == []
