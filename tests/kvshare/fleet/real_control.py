"""The connector's own control server, journal and index of segments, on a real socket, without vLLM."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from delta_tree import SegmentId
from kvshare.vllm_connector.scheduler.control_server import ControlServer
from kvshare.vllm_connector.scheduler.event_log import EventLog
from kvshare.vllm_connector.scheduler.segment_index import HeldSegment, SegmentIndex
from kvshare.vllm_protocol.messages import Dropped, JournalEvent
from kvshare.vllm_protocol.replica_info import ReplicaInfo

FIELDS = {
    "model": "tiny",
    "revision": "r",
    "tokenizer": "bytes",
    "dtype": "float32",
    "kv_layout": "1x1x8",
    "rope": "none",
}


def info_of(epoch: str = "e", **changes: object) -> ReplicaInfo:
    """What a connector that shares says of itself, but for these fields."""
    info = ReplicaInfo(
        epoch=epoch,
        model="tiny",
        versions={"vllm": "0.32.0"},
        refusals=(),
        warnings=(),
        can_move_keys=True,
        namespace_fields=FIELDS,
        bytes_per_token=64,
        max_bytes=10**7,
        num_bytes=0,
        num_segments=0,
        max_model_len=4096,
    )
    return replace(info, **changes)  # type: ignore[arg-type]  # its fields


class _Ending(ControlServer):
    """One whose connections end with it, as those of a process do."""

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        self.__dict__.setdefault("connections", []).append(connection)
        return connection, address

    def close(self) -> None:
        super().close()
        for connection in self.__dict__.get("connections", ()):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


@dataclass(eq=False)
class RealControl:
    """What the control server answers from. Only what it calls of the scheduler is here."""

    events: EventLog = field(default_factory=EventLog)
    segments: SegmentIndex = field(default_factory=lambda: SegmentIndex(10**7))
    news: None = None  # it shares no store
    dropped: list[SegmentId] = field(default_factory=list)
    changes: dict[str, object] = field(default_factory=dict)  # of what it says of itself
    port: int = 0
    _server: ControlServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def info(self) -> ReplicaInfo:
        return info_of(self.events.epoch, num_segments=len(self.segments.ids()), **self.changes)

    def hold(self, *numbers: int) -> None:
        for number in numbers:
            self.segments.add(SegmentId(number), HeldSegment("n", 10, 640))

    def tell(self, event: JournalEvent) -> None:
        self.events.append(event)

    def drop(self, segment_ids: Iterable[SegmentId]) -> int:
        """As the scheduler does it, but at once."""
        gone = self.segments.drop(segment_ids)
        self.dropped += gone
        self.events.append(Dropped(tuple(gone)))
        return len(gone)

    def start(self, *, token: str | None = None) -> None:
        """At its port; at a free one the first time."""
        self._server = _Ending(
            self.info,
            self,  # type: ignore[arg-type]  # all that it calls of a scheduler is here
            host="127.0.0.1",
            port=self.port,
            token=token,
        )
        self.port = self._server.port

    async def stop(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            await asyncio.to_thread(server.close)

    def restart_process(self) -> None:
        """A new process: another journal, and nothing is held."""
        self.events, self.segments = EventLog(), SegmentIndex(10**7)


@asynccontextmanager
async def running_control(*, token: str | None = None, **changes: object) -> AsyncIterator[RealControl]:
    control = RealControl(changes=changes)
    control.start(token=token)
    try:
        yield control
    finally:
        await control.stop()
