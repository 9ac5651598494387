"""
`KVShareMultiConnector`: KVShare and other connectors of one vLLM, say one that offloads KV to host memory.

vLLM's own MultiConnector gives all children what the first one's workers report. This one gives each child
what its own workers report, and has the outer policy for failed loads hold for all of them.

A connector that finds KV by the tokens alone would give approximate KV to requests that did not ask for any.
So KVShare shares only if the others find it by vLLM's hashes of blocks, which its salts are part of.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvshare.vllm_connector.connector import KVShareConnector

OURS = KVShareConnector.__name__


@dataclasses.dataclass(frozen=True)
class HandshakesOfChildren(KVConnectorHandshakeMetadata):
    """The reports of one worker's children, in their order."""

    each: tuple[KVConnectorHandshakeMetadata | None, ...]


class KVShareMultiConnector(MultiConnector):
    """For `kv_connector`, with the children in `kv_connector_extra_config["connectors"]`, ours first."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Raises ValueError where KVShare is not the first of the children."""
        transfer = vllm_config.kv_transfer_config
        children = transfer.kv_connector_extra_config.get("connectors", []) if transfer is not None else []
        names = [str(child.get("kv_connector")) for child in children]
        if names[:1] != [OURS]:
            raise ValueError(
                f"kv_connector_extra_config.connectors: {OURS} must be the first, as the first that has KV "
                f"of a request loads it; found {', '.join(names) or 'none'}"
            )
        super().__init__(vllm_config, role, kv_cache_config)
        self.ours: KVShareConnector = self._connectors[0]

    @classmethod
    def _get_connector_classes_and_configs(cls, vllm_config: VllmConfig) -> list[tuple[Any, VllmConfig]]:
        """
        Tell our connector the names of the others.

        All have the outer policy for failed loads, which is the only one that vLLM itself looks at.
        """
        children: list[tuple[Any, VllmConfig]] = super()._get_connector_classes_and_configs(vllm_config)
        outer = vllm_config.kv_transfer_config
        transfers = [
            transfer for _, config in children if (transfer := config.kv_transfer_config) is not None
        ]
        names = [str(transfer.kv_connector) for transfer in transfers]
        for transfer in transfers:
            if outer is not None:
                transfer.kv_load_failure_policy = outer.kv_load_failure_policy
            if transfer.kv_connector == OURS:
                extra = transfer.kv_connector_extra_config
                own = {**extra.get("kvshare", {}), "beside": [name for name in names if name != OURS]}
                transfer.kv_connector_extra_config = {**extra, "kvshare": own}
        return children

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return HandshakesOfChildren(tuple(child.get_handshake_metadata() for child in self._connectors))

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        for child, own in self._by_child(metadata):
            child.set_xfer_handshake_metadata(own)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        for child, own in self._by_child(metadata):
            child.set_xfer_handshake_metadata_pp_aware(own)

    def _by_child(
        self, metadata: Mapping[Any, KVConnectorHandshakeMetadata]
    ) -> Sequence[tuple[KVConnectorBase_V1, dict[Any, KVConnectorHandshakeMetadata]]]:
        """Return each child with what its workers sent, if anything, by their ranks."""
        children = []
        for place, child in enumerate(self._connectors):
            parts = {
                rank: part
                for rank, sent in metadata.items()
                if isinstance(sent, HandshakesOfChildren) and (part := sent.each[place]) is not None
            }
            if parts:
                children.append((child, parts))
        return children
