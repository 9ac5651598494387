"""
A load whose repairs are chosen by a first pass over some of the layers: both passes may begin before the load
has arrived, on a GPU that makes copies when the test says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from delta_tree import SegmentId
from tests.kvshare.vllm_connector.worker.early_worker import LAYERS, Early
from tests.kvshare.vllm_connector.worker.small_worker import one_rank
from tests.kvshare.vllm_connector.worker.test_ranks import on_two_ranks

if TYPE_CHECKING:
    from pathlib import Path

HEARD = 4  # three quarters of the layers


@pytest.fixture
def early() -> Any:
    with one_rank():
        yield Early(chooses=True)


def begin_second(early: Early, num_there: int) -> None:
    """Layers that the first pass needs are there, and so many in all, when the second one begins."""
    from kvshare.vllm_connector.worker.gpu import Stream

    early.begin(num_there)
    early.gpu.run(Stream.VLLM)
    assert early.read == [(layer, True) for layer in range(HEARD)]
    assert early.step(has_forward=False) == {}


@pytest.mark.parametrize("num_there", range(HEARD, LAYERS))
def test_both_passes_begin_before_the_last_layers_are_there(early: Early, num_there: int) -> None:
    """The first one ends without them, the second one waits for them; nothing is computed a third time."""
    from kvshare.vllm_connector.worker.gpu import Stream

    begin_second(early, num_there)
    early.gpu.run(Stream.VLLM)
    assert early.read[HEARD:] == [(layer, True) for layer in range(num_there)]
    early.gpu.now = 2.0
    early.gpu.run()
    result = early.step(has_forward=False)["l"]
    assert early.read[HEARD:] == [(layer, True) for layer in range(LAYERS)]
    assert (result.failed, sum(map(len, result.repaired))) == (False, 2)
    assert (early.stages["waited"], early.stages["pass"]) == (2.0, 2.0)


def test_the_second_pass_follows_the_load_if_it_is_not_due(early: Early) -> None:
    """Nothing is chosen a second time."""
    from kvshare.vllm_connector.worker.gpu import Stream

    early.begin(HEARD)
    early.gpu.run(Stream.VLLM)
    early.is_due = False
    assert early.step(has_forward=False) == {}
    assert len(early.read) == HEARD
    early.gpu.run()
    early.step(has_forward=False)  # it has arrived, and what was measured has, too
    result = early.step(has_forward=False)["l"]
    early.gpu.run()
    assert early.read[HEARD:] == [(layer, True) for layer in range(LAYERS)]
    assert (result.failed, sum(map(len, result.repaired))) == (False, 2)


@pytest.mark.parametrize("damaged", range(LAYERS))
def test_a_wrong_sum_fails_the_load(early: Early, damaged: int) -> None:
    """In a layer that only the second pass has read, too."""
    (stored,) = early.worker.attached.store.find([SegmentId(1)]).values()
    assert stored.sums is not None
    stored.sums[1, damaged] ^= 1
    begin_second(early, HEARD)
    early.gpu.run()
    result = early.step(has_forward=False)["l"]
    assert (result.failed, result.repaired) == (True, ())
    assert not early.stages.keys() & {"pass", "hidden", "waited"}


@pytest.mark.parametrize("fails_at", range(LAYERS))
def test_a_second_pass_that_fails_fails_the_load(early: Early, fails_at: int) -> None:
    """When its copies have arrived."""
    from kvshare.vllm_connector.worker.gpu import Stream

    early.begin(HEARD)
    early.gpu.run(Stream.VLLM)
    early.fails_at = fails_at
    assert early.step(has_forward=False) == {}
    early.gpu.run()
    assert early.step(has_forward=False)["l"].failed


def test_a_client_that_leaves_between_the_passes_gets_its_blocks_back(early: Early) -> None:
    """There is no second pass."""
    from kvshare.vllm_connector.worker.gpu import Stream

    early.begin(HEARD)
    early.gpu.run(Stream.VLLM)
    assert early.step(has_forward=False, cancelled=("l",)) == {}
    early.gpu.run()
    assert not early.step(has_forward=False)["l"].failed
    assert len(early.read) == HEARD


def test_ranks_begin_the_second_pass_in_the_same_step(tmp_path: Path) -> None:
    """Also where one of them expects the last layers to be there in time, and the other one does not."""

    def work(rank: int) -> tuple[list[int], bool]:
        from kvshare.vllm_connector.worker.gpu import Stream

        with one_rank():
            early = Early(chooses=True)
        early.begin(HEARD)
        early.gpu.run(Stream.VLLM)
        early.is_due = rank == 0
        early.step(has_forward=False)
        counts = [len(early.read)]
        early.is_due = True
        early.step(has_forward=False)
        early.gpu.run()
        counts.append(len(early.read))
        return counts, early.step(has_forward=False)["l"].failed

    assert on_two_ranks(tmp_path, work) == [([HEARD, HEARD + LAYERS], False)] * 2
