"""The index of a worker's files is written while it runs."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

from tests.kvshare.vllm_connector.worker.disk_worker import DiskWorker
from tests.kvshare.vllm_connector.worker.small_worker import one_rank


def test_the_index_follows_what_is_written(tmp_path: Path) -> None:
    """So that a start after a kill reads few headers."""
    from kvshare.tiers.object_index import read_index

    with one_rank(), patch("kvshare.vllm_connector.worker.disk_store._INDEX_EVERY", 2):
        worker = DiskWorker(tmp_path)
        worker.save(1, 2, 3)
        worker.wait_written(1, 2, 3)
        worker.close()
    assert set(read_index(worker.disk._files, worker.disk._folder)) == {1, 2}
