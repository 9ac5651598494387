"""What a worker reports after a step: loads and saves that have ended, and the seconds of their stages."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from kvshare.vllm_connector.metadata import LoadResult, SaveRequest, WorkerReport
from kvshare.vllm_connector.worker.device import Device
from kvshare.vllm_connector.worker.times import Times


class Reports:
    """Every load and every save is noted exactly once."""

    def __init__(self, device: Device) -> None:
        self.times = Times(device.seconds)
        self._transfers = KVConnectorTransferResults()
        self._report = WorkerReport()

    def note_load(self, request_id: str, result: LoadResult) -> None:
        """If it failed, vLLM must compute the request's prompt."""
        self._transfers.finished_recving.add(request_id)
        if result.failed:
            self._transfers.failed_recving.add(request_id)
        self._report.loads[request_id] = result

    def note_save(self, request: SaveRequest, *, has_failed: bool) -> None:
        if has_failed:
            self._report.failed_saves.add(request.request_id)
        saved = self._transfers.finished_sending if request.has_ended else self._report.saved_prompts
        saved.add(request.request_id)

    def note_new_weights(self) -> None:
        self._report.has_new_weights = True

    def take_transfers(self) -> KVConnectorTransferResults:
        """Requests whose loads and saves ended or failed since the last call, for vLLM."""
        transfers, self._transfers = self._transfers, KVConnectorTransferResults()
        return transfers

    def take_report(self) -> WorkerReport | None:
        """Everything since the last call, for our scheduler side; None if there is nothing."""
        report, self._report = self._report, WorkerReport()
        report.stage_seconds = self.times.take()
        return report if report != WorkerReport() else None
