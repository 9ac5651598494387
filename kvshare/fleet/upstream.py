"""What the engine asks of one vLLM and the connector inside it. Over HTTP: `proxy/relay/upstream.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from delta_tree import SegmentId
from kvshare.vllm_protocol.messages import HeldSegments, Journal, ReplicaInfo


@dataclass(frozen=True, slots=True)
class ServedModels:
    """What `/v1/models` of a vLLM lists: names of the base model; an adapter's requests are not shared."""

    names: tuple[str, ...]
    max_model_len: int = 0


class Upstream(Protocol):
    """One replica. Every call has a timeout and raises UpstreamError, and nothing else."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def check_health(self) -> None:
        """Raises UpstreamError unless vLLM takes requests."""

    async def models(self) -> ServedModels: ...

    async def tokenize(self, body: Mapping[str, Any]) -> list[int]:
        """The token ids of vLLM's own `/tokenize`."""

    async def info(self) -> ReplicaInfo: ...

    async def journal(self, *, after: int, wait_s: float) -> Journal:
        """Events after a sequence number; waits up to `wait_s` for the first."""

    async def segments(self) -> HeldSegments: ...

    async def drop(self, segment_ids: Iterable[SegmentId]) -> None:
        """Let the connector forget segments."""
