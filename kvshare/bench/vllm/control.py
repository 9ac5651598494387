"""What the connector reports through its control server, watched while a benchmark runs."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from kvshare.fleet.client import ControlClient
from kvshare.vllm_protocol.messages import Dropped, Finished

_POLL_S = 0.05


@dataclass(slots=True)
class Watch:
    """What was seen of the connector since the watch began."""

    max_bytes: int = 0  # that it may hold
    peak_bytes: int = 0  # that it held
    num_dropped: int = 0  # segments
    finished: list[Finished] = field(default_factory=list)
    last: int = 0  # event that was read

    async def look(self, control: ControlClient) -> None:
        """Read what is new."""
        info = await control.info()
        self.max_bytes = info.max_bytes
        self.peak_bytes = max(self.peak_bytes, info.num_bytes)
        journal = await control.journal(after=self.last, wait_s=0)
        self.last = journal.last
        for event in journal.events:
            if isinstance(event, Dropped):
                self.num_dropped += len(event.segment_ids)
            else:
                self.finished.append(event)

    @property
    def decisions(self) -> dict[str, int]:
        """How many requests ended in each decision, and why less was shared than planned."""
        found = Counter(event.decision for event in self.finished)
        found.update(f"reason:{event.reason}" for event in self.finished if event.reason is not None)
        return dict(sorted(found.items()))


@asynccontextmanager
async def watching(control: ControlClient) -> AsyncIterator[Watch]:
    """A watch that looks twenty times a second, and once more at the end. What came before is not counted."""
    watch = Watch()
    watch.last = (await control.journal(after=0, wait_s=0)).last

    async def keep_looking() -> None:
        while True:
            await watch.look(control)
            await asyncio.sleep(_POLL_S)

    task = asyncio.create_task(keep_looking())
    try:
        yield watch
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await watch.look(control)
