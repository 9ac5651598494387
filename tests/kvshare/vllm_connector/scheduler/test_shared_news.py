"""What a scheduler hears of a shared store, and what it has deleted there. Over a real Redis."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from delta_tree import Segment, SegmentId
from kvshare.tiers.shared_segments import SegmentNews
from kvshare.tiers.shared_start import open_shared_store, place_name
from kvshare.vllm_protocol.places import OnDiskOnly
from tests.redis_server import RedisServer, needs_redis, redis_at

if TYPE_CHECKING:
    from kvshare.vllm_connector.scheduler.disk_plan import DiskPlan
    from kvshare.vllm_connector.scheduler.shared_news import SharedNews

pytestmark = needs_redis
WAIT_S = 60.0
FORM = "a form"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_at(tmp_path) as started:
        yield started


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
    closing: list[Callable[[], None]] = field(default_factory=list)

    def events(self) -> list[OnDiskOnly]:
        return [each for each in self.disk.events.read(0).events if isinstance(each, OnDiskOnly)]

    def knows(self, *numbers: int) -> bool:
        return set(self.disk.segments.disk.ids()) == set(numbers)


@pytest.fixture
def begin(server: RedisServer) -> Iterator[Callable[..., Side]]:
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


def test_what_was_there_is_known_when_it_has_begun(server: RedisServer, begin: Callable[..., Side]) -> None:
    """But for what has ended; the proxy hears of it with its bytes."""
    writer = Writer(server)
    writer.write(*map(segment, range(1, 6)))
    writer.store.delete([writer.store.segment_key(segment(3))])
    side = begin()
    assert side.knows(1, 2, 4, 5)
    assert [(each.came, each.num_bytes) for each in side.events()] == [((1, 2, 4, 5), (100,) * 4)]


def test_what_is_written_later_is_heard(server: RedisServer, begin: Callable[..., Side]) -> None:
    """By all; a load then says what it is, and only where it is read from below."""
    from kvshare.vllm_connector.metadata import LoadRequest
    from kvshare.vllm_protocol.messages import WireCopy

    one, other = begin(), begin()
    Writer(server).write(segment(1), segment(2))
    until(lambda: one.knows(1, 2) and other.knows(1, 2))
    copy = WireCopy(SegmentId(1), 0, 9, 0, 0)
    load = one.disk.with_reads(LoadRequest("r", (1,), 0, 10, tuple(range(10)), (copy,)), 0.5)
    assert (load.shared, load.reads_within_s) == ((segment(1),), 0.5)
    assert one.disk.segments.covers(SegmentId(1), "n", end=10)
    assert not one.disk.segments.covers(SegmentId(1), "another", end=10)


def test_more_than_may_be_known_leaves_the_oldest(server: RedisServer, begin: Callable[..., Side]) -> None:
    """They are forgotten here, and stay in the store."""
    writer = Writer(server)
    writer.write(*map(segment, range(1, 6)))
    side = begin(max_bytes=300)
    assert side.knows(3, 4, 5)
    assert all(writer.has(segment(number)) for number in range(1, 6))


def test_what_the_proxy_drops_is_deleted_for_all(server: RedisServer, begin: Callable[..., Side]) -> None:
    """Also what is written, or announced, after that; and it is not taken up again."""
    writer, side = Writer(server), begin()
    writer.write(segment(1))
    until(lambda: side.knows(1))
    side.news.note_dropped([SegmentId(1), SegmentId(2)])
    side.disk.drops.drop([SegmentId(1)])
    until(lambda: not writer.has(segment(1)))
    writer.write(segment(2), segment(3))
    until(lambda: side.knows(3) and not writer.has(segment(2)))


def test_new_weights_end_it(server: RedisServer, begin: Callable[..., Side]) -> None:
    """What others write is of the old ones."""
    writer, side = Writer(server), begin()
    side.disk.give_up()
    writer.write(segment(1))
    until(lambda: side.news._news._after is not None)
    assert side.knows()
    assert writer.has(segment(1))


def test_a_store_that_hangs_delays_a_start_only(
    server: RedisServer, begin: Callable[..., Side], caplog: pytest.LogCaptureFixture
) -> None:
    """Not for ever: it is heard when it answers, and the log says once that it did not."""
    writer = Writer(server)
    writer.write(segment(1))
    server.process.send_signal(signal.SIGSTOP)
    try:
        with caplog.at_level(logging.WARNING, logger="vllm.kvshare"):
            side = begin(timeout_s=0.2)
        assert side.knows()
    finally:
        server.process.send_signal(signal.SIGCONT)
    assert "does not answer in time" in caplog.text
    assert side.news.warnings == ("the shared store cannot be used now: it does not answer in time",)
    side.news._store.breaker._until = 0.0  # as if its pause were over
    until(lambda: side.knows(1) and side.news.warnings == ())


def test_what_nobody_with_the_key_has_written_is_ignored(
    server: RedisServer, begin: Callable[..., Side]
) -> None:
    """Nonsense, and an announcement without a key, in the stream of those that have one."""
    key = server.folder / "key"
    key.write_text("ab" * 32)
    side = begin(seal_key_file=str(key))
    channel = side.news._news._channel
    for message in (b"", b"[]", b"[1,2,3]", b'[1,"n",0,10,0,100,1]', b"KVSEAL1\0" + bytes(60)):
        server.client().xadd(channel, {b"m": message})
    until(lambda: side.news._news.num_damaged == 5)
    assert side.knows()


def test_announcements_that_no_vllm_makes_are_ignored(
    server: RedisServer, begin: Callable[..., Side]
) -> None:
    """Without a key anybody may write; what cannot be a segment is none."""
    side = begin()
    channel = side.news._news._channel
    wrong = [
        *(b"", b"{}", b"[1]", b'["x","n",0,10,0,100,1]', b"[1,5,0,10,0,100,1]", b'[1,"n",0,0,0,100,1]'),
        *(b'[1,"n",0,10,1,100,1]', b'[1,"n",-1,10,0,100,1]', b'[1,"n",0,10,0,0,1]', b"\xff\xfe", b"[" * 5000),
    ]
    for message in wrong:
        server.client().xadd(channel, {b"m": message})
    until(lambda: side.news._news.num_damaged == len(wrong))
    assert side.knows()
    Writer(server).write(segment(7))
    until(lambda: side.knows(7))


def test_the_name_of_a_place(server: RedisServer) -> None:
    """The same for two who use one store; another database, address or form is another."""
    chosen = server.settings()
    names = [
        place_name(settings, open_shared_store(settings, form))
        for settings, form in [
            (chosen, FORM),
            (server.settings(timeout_s=9.0), FORM),
            (server.settings(url=f"redis://127.0.0.1:{server.port}"), FORM),
            (server.settings(url=f"redis://localhost:{server.port}/1"), FORM),
            (server.settings(url="redis://localhost:1/0"), FORM),
            (chosen, "another form"),
        ]
    ]
    assert len(set(names[:3])) == 1
    assert len(set(names)) == 4
    assert not any(str(server.port) in name for name in names)
