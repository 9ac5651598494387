"""The worker class with faults: a rank raises at a stage, as the file of KVSHARE_FAULTS says just then."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.parallel_state import get_tp_group

from delta_tree import SegmentId
from kvshare.vllm_connector.worker.copy_writer import CopyWriter
from kvshare.vllm_connector.worker.partial_forward import PartialForward
from kvshare.vllm_connector.worker.self_test import SelfTest
from kvshare.vllm_connector.worker.worker import ConnectorWorker
from kvshare.vllm_connector.workers import KVShareWorker

STAGES = {
    "prepare": (ConnectorWorker, "_take_model"),
    "self-test": (SelfTest, "check_listening"),
    "fetch": (ConnectorWorker, "_readable"),
    "place": (CopyWriter, "write"),
    "pass": (PartialForward, "_forward"),
    "save": (ConnectorWorker, "_copy_out"),
}


def _failing(stage: str, method: Any) -> Any:
    @functools.wraps(method)
    def act(*arguments: Any, **options: Any) -> Any:
        if Path(os.environ["KVSHARE_FAULTS"]).read_text() == f"{get_tp_group().rank_in_group}:{stage}":
            raise RuntimeError("out of memory")
        return method(*arguments, **options)

    return act


for _stage, (_kind, _name) in STAGES.items():
    setattr(_kind, _name, _failing(_stage, getattr(_kind, _name)))


class FailingWorker(KVShareWorker):
    def segments(self) -> list[int]:
        """What this rank holds."""
        connector: Any = get_kv_transfer_group()
        return sorted(connector._worker._store.ids())

    def whole_segment(self, segment_id: int) -> list[float]:
        """All heads of a segment as they lie in the memory that this rank sees: the first key of each."""
        from kvshare.vllm_connector.worker.segment_store import SegmentStore

        connector: Any = get_kv_transfer_group()
        store: SegmentStore = connector._worker._store
        stored = store._stored[SegmentId(segment_id)]
        shape = (store._memory.num_heads, *stored.rows.shape[1:])
        return list(store.arena.view(stored.extent, shape, stored.rows.dtype)[:, 0, 0, 0].flatten().tolist())
