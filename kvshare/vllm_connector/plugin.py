"""Entry point of the group `vllm.general_plugins`: runs in every process of vLLM."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvshare.crash_report import report_crashes

NAME = "KVShareConnector"


def register() -> None:
    """Register the connector by its name. May run several times in a process."""
    report_crashes()
    if NAME not in KVConnectorFactory._registry:  # there is no public query
        KVConnectorFactory.register_connector(NAME, "kvshare.vllm_connector.connector", NAME)
