"""Entry point of the group `vllm.general_plugins`: runs in every process of vLLM."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvshare.crash_report import report_crashes

MODULES = {
    "KVShareConnector": "kvshare.vllm_connector.connector",
    "KVShareMultiConnector": "kvshare.vllm_connector.beside",
}


def register() -> None:
    """Register the connectors by their names. May run several times in a process."""
    report_crashes()
    for name, module in MODULES.items():
        if name not in KVConnectorFactory._registry:  # there is no public query
            KVConnectorFactory.register_connector(name, module, name)
