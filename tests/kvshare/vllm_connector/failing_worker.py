"""The worker class with faults: a rank raises at a stage, as the file of KVSHARE_FAULTS says just then."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path

from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.parallel_state import get_tp_group

from delta_tree import SegmentId
from kvshare.vllm_connector.connector import KVShareConnector
from kvshare.vllm_connector.worker import host_copies
from kvshare.vllm_connector.worker.host_copies import HostLoad, HostSave
from kvshare.vllm_connector.worker.partial_forward import PartialForward
from kvshare.vllm_connector.worker.segment_store import SegmentStore
from kvshare.vllm_connector.worker.self_test import SelfTest
from kvshare.vllm_connector.worker.start import WorkerStart
from kvshare.vllm_connector.workers import KVShareWorker

STAGES = {
    "prepare": (WorkerStart, "_read_models"),
    "self-test": (SelfTest, "check_listening"),
    "verify": (HostLoad, "_compare"),
    "write": (host_copies, "write_layers"),
    "pass": (PartialForward, "_forward"),
    "save": (HostSave, "_copy"),
}


def _failing(stage: str, method: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(method)
    def act(*arguments: object, **options: object) -> object:
        if Path(os.environ["KVSHARE_FAULTS"]).read_text() == f"{get_tp_group().rank_in_group}:{stage}":
            raise RuntimeError("out of memory")
        return method(*arguments, **options)

    return act


for _stage, (_kind, _name) in STAGES.items():
    setattr(_kind, _name, _failing(_stage, getattr(_kind, _name)))


class FailingWorker(KVShareWorker):
    def segments(self) -> list[int]:
        """What this rank holds."""
        return sorted(self._segment_store().ids())

    def whole_segment(self, segment_id: int) -> list[float]:
        """All heads of a segment as they lie in the memory that this rank sees: the first key of each."""
        store = self._segment_store()
        stored = store._stored[SegmentId(segment_id)]
        shape = (store._num_heads, *stored.rows.shape[1:])
        return list(store.arena.view(stored.extent, shape, stored.rows.dtype)[:, 0, 0, 0].flatten().tolist())

    def _segment_store(self) -> SegmentStore:
        connector: KVShareConnector = get_kv_transfer_group()
        assert connector._worker is not None
        return connector._worker.attached.store
