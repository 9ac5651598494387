"""What a worker reports after a step: loads and saves that have ended, and the seconds of their stages."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from kvshare.vllm_connector.metadata import DiskReport, LoadRequest, LoadResult, SaveRequest, WorkerReport
from kvshare.vllm_connector.worker.copying import Job
from kvshare.vllm_connector.worker.device import Device
from kvshare.vllm_connector.worker.paces import Paces
from kvshare.vllm_connector.worker.times import Times
from kvshare.vllm_connector.worker.under_way import PendingLoad
from kvshare.vllm_protocol.stages import AHEAD, HIDDEN, PASS, WAITED, WRITE


class Reports:
    """Collects the report of a step. Every load and every save is noted exactly once."""

    def __init__(self, device: Device) -> None:
        self.times = Times(device.seconds)
        self.paces = Paces(device.seconds)
        self._device = device
        self._transfers = KVConnectorTransferResults()
        self._report = WorkerReport()

    def note_load(self, request_id: str, result: LoadResult) -> None:
        """Note the end of a load. If it failed, vLLM must compute the request's prompt."""
        self._transfers.finished_recving.add(request_id)
        if result.failed:
            self._transfers.failed_recving.add(request_id)
        self._report.loads[request_id] = result

    def note_joined(self, request_id: str, result: LoadResult) -> None:
        """Note the end of a load that joined a step: vLLM does not wait for it."""
        self._report.loads[request_id] = result

    def note_pass(
        self, began: Any, ended: Any, num_run: dict[str, int], *, is_plain: bool, is_whole: bool = True
    ) -> None:
        """
        Note a pass between two marks of the device. `is_plain`: it did not listen; `is_whole`: it did not end
        before the last layer.
        """
        self.times.add(PASS, began, ended, num_run)
        if is_whole:
            self.paces.note_pass(sum(num_run.values()), began, ended, is_plain=is_plain)

    def note_ahead(self, began: Any, ended: Any, num_run: dict[str, int]) -> None:
        """Note a pass over what comes before the first copies of loads that wait for a disk: a long one."""
        for stage in (PASS, AHEAD):
            self.times.add(stage, began, ended, num_run)

    def note_pace(self, load: PendingLoad, job: Job) -> None:
        """Note the pace of a load that had several batches. A single batch is small and slower per byte."""
        arrivals = load.work.arrivals if load.work is not None else None
        if arrivals is not None and arrivals.is_cut and not job.failed:
            self.paces.note_load(arrivals.num_bytes, job.seconds[WRITE])

    def note_disk(self, report: DiskReport | None) -> None:
        """Note what was written to disk, or why nothing is."""
        if report is not None:
            before = () if self._report.disk is None else self._report.disk.written
            self._report.disk = DiskReport((*before, *report.written), report.problem)

    def note_early(self, load: PendingLoad) -> None:
        """Note the early passes of a load that has arrived by now."""
        request_id, early, work = load.request.request_id, load.early, load.work
        assert early is not None
        assert work is not None
        arrivals = work.arrivals
        assert arrivals is not None
        for each in early.passes:
            self.times.add(PASS, each.began, each.ended, {request_id: each.num_tokens})

        def measured() -> dict[str, float] | None:
            first, *others = early.passes
            gaps = [self._device.seconds(first.ended, early_pass.began) for early_pass in others]
            seconds = [
                self._device.seconds(early_pass.began, early_pass.ended) for early_pass in early.passes
            ]
            waited = [arrivals.waited_s(early_pass.waits) for early_pass in early.passes]
            if None in (*seconds, *waited):
                return None
            for early_pass, pass_s, waited_s in zip(early.passes, seconds, waited, strict=True):
                assert pass_s is not None
                assert waited_s is not None
                self.paces.note_early(
                    early_pass.num_tokens,
                    pass_s,
                    waited_s=waited_s,
                    is_plain=not early_pass.listened,
                    share=early_pass.share,
                )
            total_s = sum(filter(None, waited))
            hidden_s = work.written_s(early.began) - total_s - sum(filter(None, gaps))
            return {HIDDEN: max(0.0, hidden_s), WAITED: total_s}

        self.times.note_later(request_id, measured)

    def note_arriving(self, request_id: str) -> None:
        """Announce a load to vLLM as arrived before it has: it joins a later step."""
        self._transfers.finished_recving.add(request_id)
        self._report.arriving.add(request_id)

    def note_step(self, number: int) -> None:
        self._report.step = number

    def note_copied(self, load: LoadRequest) -> None:
        """Note that a load's copies are made: the blocks from which it was copied may be reused."""
        if load.sources:
            self._report.copied.add(load.request_id)

    def note_save(self, request: SaveRequest, *, has_failed: bool) -> None:
        if has_failed:
            self._report.failed_saves.add(request.request_id)
        saved = self._transfers.finished_sending if request.has_ended else self._report.saved_prompts
        saved.add(request.request_id)

    def note_new_weights(self) -> None:
        self._report.has_new_weights = True

    def take_transfers(self) -> KVConnectorTransferResults:
        """Return for vLLM the requests whose loads and saves ended or failed since the last call."""
        transfers, self._transfers = self._transfers, KVConnectorTransferResults()
        return transfers

    def take_report(self) -> WorkerReport | None:
        """Return everything since the last call, for our scheduler side; None if there is nothing."""
        report, self._report = self._report, WorkerReport()
        report.stage_seconds = self.times.take()
        return report if report != WorkerReport() else None
