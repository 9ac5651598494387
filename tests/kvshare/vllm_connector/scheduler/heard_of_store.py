"""What other vLLMs write to a shared store, and the part of a scheduler that hears of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from delta_tree import Segment, SegmentId
from kvshare.tiers.shared_segments import SegmentNews
from kvshare.tiers.shared_start import open_shared_store
from kvshare.vllm_protocol.places import OnDiskOnly
from tests.redis_server import RedisServer

if TYPE_CHECKING:
    from kvshare.vllm_connector.scheduler.disk_plan import DiskPlan
    from kvshare.vllm_connector.scheduler.shared_news import SharedNews

WAIT_S = 60.0
FORM = "a form"


def segment(number: int, namespace: str = "n", num_bytes: int = 100) -> Segment:
    return Segment(SegmentId(number), namespace, 0, 10, 0, num_bytes, number)


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Writer:
    """Another vLLM: its values are there when it announces them."""

    def __init__(self, server: RedisServer, **settings: Any) -> None:
        self.store = open_shared_store(server.settings(**settings), FORM)
        self.news = SegmentNews(self.store)

    def write(self, *segments: Segment) -> None:
        for each in segments:
            self.store.put(self.store.segment_key(each), b"value")
            self.news.announce(each)

    def has(self, one: Segment) -> bool:
        return self.store.get(self.store.segment_key(one)) is not None


@dataclass
class Side:
    """The part of a scheduler that hears of the store."""

    disk: DiskPlan
    news: SharedNews

    def events(self) -> list[OnDiskOnly]:
        return [each for each in self.disk.events.read(0).events if isinstance(each, OnDiskOnly)]

    def knows(self, *numbers: int) -> bool:
        return set(self.disk.segments.disk.ids()) == set(numbers)


@contextmanager
def beginning(server: RedisServer) -> Iterator[Callable[..., Side]]:
    """`begin(max_bytes=1000)`: a scheduler that starts; `max_bytes` of what it may know."""
    from kvshare.vllm_connector.scheduler.disk_plan import DiskPlan
    from kvshare.vllm_connector.scheduler.drops import Drops
    from kvshare.vllm_connector.scheduler.event_log import EventLog
    from kvshare.vllm_connector.scheduler.segment_index import SegmentIndex
    from kvshare.vllm_connector.scheduler.shared_news import SharedNews

    started: list[Side] = []

    def new(max_bytes: int = 10**6, **settings: Any) -> Side:
        segments, events = SegmentIndex(10**6, max_disk_bytes=max_bytes), EventLog()
        disk = DiskPlan(segments, Drops(segments, events), events)
        disk.begin(())
        news = SharedNews(open_shared_store(server.settings(**settings), FORM), disk, place="p")
        started.append(Side(disk, news))
        news.begin()
        return started[-1]

    yield new
    for each in started:
        with suppress(OSError):
            each.news.close()
