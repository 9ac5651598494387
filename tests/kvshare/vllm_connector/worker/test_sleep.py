"""vLLM sleeps: its KV cache loses its memory, and gets other. The real worker, over a small cache."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from delta_tree import SegmentId, Span
from kvshare.vllm_protocol.messages import WireCopy
from tests.kvshare.vllm_connector.worker.small_worker import (
    DIM,
    HEADS,
    LAYERS,
    NUM_TOKENS,
    late_copies,
    new_worker,
    one_rank,
)

if TYPE_CHECKING:
    import torch

    from kvshare.vllm_connector.metadata import LoadRequest, SaveRequest, StepMetadata
    from kvshare.vllm_connector.worker.worker import ConnectorWorker

SEGMENT, VALUE = SegmentId(1), 5.0
SAVED, LOADED = (1, 2, 3), (4, 5, 6)  # blocks


@pytest.fixture
def worker() -> Iterator[ConnectorWorker]:
    with one_rank():
        yield new_worker(max_segments=4)


def write(worker: ConnectorWorker, blocks: tuple[int, ...], value: float) -> None:
    import torch

    rows = torch.full((LAYERS, NUM_TOKENS, HEADS, DIM), value)
    worker.attached.cache.write(rows, -rows, worker.attached.cache.slots(blocks, Span(0, NUM_TOKENS)))


def save(name: str = "save", segment_id: SegmentId = SEGMENT) -> SaveRequest:
    from kvshare.vllm_connector.metadata import SaveRequest

    return SaveRequest(name, SAVED, ((segment_id, Span(0, NUM_TOKENS)),))


def load(name: str = "load") -> LoadRequest:
    from kvshare.vllm_connector.metadata import LoadRequest

    copy = WireCopy(SEGMENT, 0, NUM_TOKENS, 0, 0)
    return LoadRequest(name, LOADED, 0, NUM_TOKENS, tuple(range(NUM_TOKENS)), (copy,))


def step(
    worker: ConnectorWorker, *, loads: tuple[LoadRequest, ...] = (), saves: tuple[SaveRequest, ...] = ()
) -> StepMetadata:
    """Run one step of the worker."""
    from kvshare.vllm_connector.metadata import StepMetadata

    made = StepMetadata(loads=loads, saves=saves)
    worker.begin(made)
    worker.advance(made)
    worker.save(made)
    return made


def store(worker: ConnectorWorker) -> None:
    """One segment is stored."""
    write(worker, SAVED, VALUE)
    step(worker, saves=(save(),))
    late_copies(worker).run()
    step(worker)
    assert worker.take_transfers().finished_sending == {"save"}


def renew(worker: ConnectorWorker) -> list[torch.Tensor]:
    """The caches get other memory. Returns the old ones, which hold a value that nothing of ours has."""
    import torch

    stale = []
    for layer in worker.attached.cache.layers.values():
        stale.append(layer.kv_cache.fill_(99.0))
        layer.kv_cache = torch.zeros_like(layer.kv_cache)
    return stale


def test_a_load_after_a_sleep_fills_the_new_memory(worker: ConnectorWorker) -> None:
    """Segments are host memory and outlast the sleep; the old caches are neither read nor written."""
    store(worker)
    worker.release_caches()
    stale = renew(worker)
    worker.restore_caches()
    step(worker, loads=(load(),))
    late_copies(worker).run()
    step(worker)
    assert worker.take_transfers().failed_recving == set()
    assert (worker.attached.cache.read(LOADED, Span(0, NUM_TOKENS)).k == VALUE).all()
    assert all((cache == 99.0).all() for cache in stale)


def test_a_sleep_waits_for_a_save(worker: ConnectorWorker) -> None:
    """Its rows are copied while they are there, and it counts."""
    write(worker, SAVED, VALUE)
    step(worker, saves=(save(),))
    worker.release_caches()
    assert not late_copies(worker).jobs
    renew(worker)
    worker.restore_caches()
    step(worker)
    assert worker.take_transfers().finished_sending == {"save"}
    report = worker.build_connector_worker_meta()
    assert report is None or not report.failed_saves
    assert (worker.attached.store.find([SEGMENT])[SEGMENT].rows[:, :, 0] == VALUE).all()


@pytest.mark.parametrize("has_arrived", [False, True], ids=["copying", "arrived"])
def test_a_load_that_a_sleep_interrupts_fails(
    worker: ConnectorWorker, monkeypatch: pytest.MonkeyPatch, has_arrived: bool
) -> None:
    """What it has written is lost with the cache, so that vLLM must compute the prompt."""

    from kvshare.vllm_connector.worker import placeholders

    store(worker)
    with monkeypatch.context() as patch:
        patch.setattr(placeholders, "num_admitted", lambda *_, **__: 0)  # none is computed
        step(worker, loads=(load("first"), load("second")))
        if has_arrived:
            late_copies(worker).run()
            late_copies(worker).run()
            step(worker)
            assert len(worker.parts.placeholders._arrived) == 2
        worker.release_caches()
    renew(worker)
    worker.restore_caches()
    step(worker)
    assert worker.take_transfers().failed_recving == {"first", "second"}
    report = worker.build_connector_worker_meta()
    assert report is not None
    assert all(result.failed for result in report.loads.values())
    assert not worker.parts.transfers._under_way


def test_what_begins_while_it_sleeps_fails_at_once(worker: ConnectorWorker) -> None:
    """Both are reported, or vLLM would wait for them; neither touches the cache."""
    store(worker)
    worker.release_caches()
    stale = renew(worker)
    step(worker, loads=(load(),), saves=(save("other", SegmentId(2)),))
    assert not late_copies(worker).jobs
    transfers, report = worker.take_transfers(), worker.build_connector_worker_meta()
    assert (transfers.failed_recving, transfers.finished_sending) == ({"load"}, {"other"})
    assert report is not None
    assert report.failed_saves == {"other"}
    assert all((cache == 99.0).all() for cache in stale)
    assert all((layer.kv_cache == 0).all() for layer in worker.attached.cache.layers.values())


def test_being_told_twice_changes_nothing(worker: ConnectorWorker) -> None:
    """vLLM 0.33 tells the connector, as does our worker class."""
    store(worker)
    for _ in range(2):
        worker.release_caches()
    renew(worker)
    for _ in range(2):
        worker.restore_caches()
    step(worker, loads=(load(),))
    late_copies(worker).run()
    step(worker)
    transfers = worker.take_transfers()
    assert (transfers.finished_recving, transfers.failed_recving) == ({"load"}, set())


def test_a_cache_of_another_layout_is_not_touched(
    worker: ConnectorWorker, caplog: pytest.LogCaptureFixture
) -> None:
    """The self-test at start has not seen it."""
    store(worker)
    worker.release_caches()
    for layer in worker.attached.cache.layers.values():
        layer.kv_cache = layer.kv_cache.transpose(1, 2).contiguous().transpose(1, 2)
    with caplog.at_level(logging.ERROR, logger="vllm.kvshare"):
        worker.restore_caches()
    assert "another layout than at the self-test" in caplog.text
    step(worker, loads=(load(),))
    assert worker.take_transfers().failed_recving == {"load"}
