"""One vLLM behind the proxy: whether it takes requests, whether its connector is heard, how busy it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NewType

from kvshare.engines.base import ReplicaStatus
from kvshare.fleet.tier import ReplicaTier
from kvshare.fleet.upstream import ServedModels, Upstream
from kvshare.vllm_protocol.messages import ReplicaInfo

ReplicaName = NewType("ReplicaName", str)
NAMESPACE_FIELDS = ("model", "revision", "tokenizer", "dtype", "kv_layout", "rope")


@dataclass(slots=True, eq=False)
class Replica:
    """State, changed by its `Follower` and by the requests that run there."""

    name: str
    upstream: Upstream = field(repr=False)
    models: ServedModels | None = None  # None: vLLM does not answer
    refusal: str | None = None  # why it gets no requests although it answers
    info: ReplicaInfo | None = None  # of the connector, since it was last heard
    is_heard: bool = False  # the journal is being followed
    num_inflight: int = 0

    @property
    def serves(self) -> bool:
        return self.models is not None and self.refusal is None

    @property
    def shares(self) -> bool:
        """Whether plans may be made for it."""
        return self.serves and self.is_heard and self.info is not None and self.info.shares

    def status(self, tier: ReplicaTier) -> ReplicaStatus:
        return ReplicaStatus(
            name=self.name,
            serves=self.serves,
            shares=self.shares,
            num_inflight=self.num_inflight,
            num_segments=tier.num_segments_at(self.name),
            kv_bytes=tier.num_bytes_at(self.name),
        )
