"""What comes at the same time, in turn or not at all: resets, starts, and a store that refuses or loses."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from delta_tree import Segment, SegmentId
from kvshare.tiers.shared_backend import BackendError
from kvshare.tiers.shared_segments import SegmentNews
from kvshare.tiers.shared_tier import SharedStore
from tests.kvshare.vllm_connector.scheduler.heard_of_store import (
    Side,
    Writer,
    beginning,
    segment,
    until,
)
from tests.redis_server import RedisServer, needs_redis, redis_at

pytestmark = needs_redis


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_at(tmp_path) as started:
        yield started


@pytest.fixture
def begin(server: RedisServer) -> Iterator[Callable[..., Side]]:
    """A scheduler that starts."""
    with beginning(server) as start:
        yield start


def test_a_reset_while_news_come_leaves_nothing(server: RedisServer, begin: Callable[..., Side]) -> None:
    """Whatever has been adopted by then is dropped, and nothing is after it."""
    from kvshare.vllm_connector.scheduler.scheduler import ConnectorScheduler

    side = begin()
    scheduler = ConnectorScheduler(segments=side.disk.segments, events=side.disk.events)
    resetting = threading.Thread(target=scheduler.reset_cache)

    def heard() -> Iterator[Segment]:
        yield segment(1)
        resetting.start()
        resetting.join(0.5)  # it has ended by then, or waits for the end of this
        yield segment(2)

    scheduler.disk.adopt(heard())
    resetting.join()
    scheduler.disk.adopt([segment(3)])
    assert scheduler.segments.ids() == []
    assert scheduler.disk.shared == {}


def test_what_a_step_drops_is_not_told_to_its_loads() -> None:
    """The worker drops first, and would have it again, for ever."""
    from vllm.v1.core.sched.output import SchedulerOutput

    from kvshare.vllm_connector.metadata import LoadRequest
    from kvshare.vllm_connector.scheduler.event_log import EventLog
    from kvshare.vllm_connector.scheduler.scheduler import ConnectorScheduler
    from kvshare.vllm_connector.scheduler.segment_index import SegmentIndex

    scheduler = ConnectorScheduler(segments=SegmentIndex(1000, max_disk_bytes=1000), events=EventLog())
    scheduler.disk.begin(())
    scheduler.disk.adopt([segment(1), segment(2)])
    known = (segment(1), segment(2))
    scheduler._loads.append(LoadRequest("r", (1,), 0, 10, tuple(range(10)), (), shared=known))
    scheduler.drop([SegmentId(1)])
    step = scheduler.build_connector_meta(SchedulerOutput.make_empty())
    assert step.drops == (SegmentId(1),)
    assert [load.shared for load in step.loads] == [(segment(2),)]


def test_the_newest_are_found_first(server: RedisServer, begin: Callable[..., Side]) -> None:
    """Of more than a page; a failure in the middle ends nothing, and no page is lost."""
    writer = Writer(server)
    writer.write(*map(segment, range(1, 701)))
    calls: list[int] = []
    renew = SharedStore.renew

    def fails_once(store: SharedStore, keys: Sequence[str]) -> list[bool]:
        calls.append(len(keys))
        if len(calls) == 2:
            raise BackendError("it does not answer in time")
        return renew(store, keys)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SharedStore, "renew", fails_once)
        side = begin()
    assert not side.news.is_listing
    assert side.knows(*range(1, 701))
    assert calls == [256, 256, 256, 188]
    assert [each.came[-1] for each in side.events()] == [700, 444, 188]
    assert side.disk.segments.disk.ids() == list(range(1, 701))


def test_a_page_whose_adoption_failed_comes_again(server: RedisServer) -> None:
    writer = Writer(server)
    heard = SegmentNews(writer.store)
    assert heard.take_earlier(fail) is False
    writer.write(segment(1))
    taken: list[Segment] = []
    with pytest.raises(BackendError):
        heard.take(fail)
    assert heard.take(taken.extend)
    assert not heard.take(taken.extend)
    assert taken == [segment(1)]


def fail(segments: Sequence[Segment]) -> None:
    raise BackendError("it does not answer in time")


def test_a_start_that_found_not_all_says_so(server: RedisServer, begin: Callable[..., Side]) -> None:
    """Until it has: the proxy evicts nothing for that meanwhile."""
    writer = Writer(server)
    writer.write(*map(segment, range(1, 301)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_news_module(), "START_S", -1.0)
        side = begin()
    until(lambda: not side.news.is_listing)
    assert side.knows(*range(1, 301))


def shared_news_module() -> Any:
    from kvshare.vllm_connector.scheduler import shared_news

    return shared_news


def test_a_store_that_refuses_to_delete_is_heard_and_renewed(
    server: RedisServer, begin: Callable[..., Side], caplog: pytest.LogCaptureFixture
) -> None:
    """As its access rules may say. The log and `/info` tell."""
    server.client().execute_command("ACL", "SETUSER", "default", "-unlink")
    writer, side = Writer(server, keep_s=60), begin(keep_s=60)
    writer.write(segment(1), segment(2))
    until(lambda: side.knows(1, 2))
    with caplog.at_level(logging.WARNING, logger="vllm.kvshare"):
        side.news.note_dropped([SegmentId(1)])
        side.disk.drops.drop([SegmentId(1)])
        until(lambda: side.news._delete_problem is not None)
    assert side.news.warnings == (
        "nothing is deleted in the shared store: its access rules refuse this user",
    )
    assert "is not deleted in the shared store" in caplog.text
    client, name = server.client(), writer.store.segment_key(segment(2))
    client.expire(name, 1000)
    side.news._renewed_at = -1e9
    until(lambda: client.ttl(name) <= 60)
    writer.write(segment(3))
    until(lambda: side.knows(2, 3))
    client.execute_command("ACL", "SETUSER", "default", "+unlink")
    side.news._delete_from = 0.0  # as if its pause were over
    until(lambda: not writer.has(segment(1)) and side.news.warnings == ())


def test_what_was_dropped_last_is_deleted_when_vllm_ends(
    server: RedisServer, begin: Callable[..., Side]
) -> None:
    writer, side = Writer(server), begin()
    writer.write(segment(1))
    until(lambda: side.knows(1))
    side.news.note_dropped([SegmentId(1)])
    side.news.close()
    until(lambda: not writer.has(segment(1)))


@pytest.mark.parametrize("has_files", [False, True])
def test_what_has_ended_is_forgotten_with_the_next_renewal(
    server: RedisServer, begin: Callable[..., Side], has_files: bool
) -> None:
    """The store needed its room; a disk may have it all the same."""
    writer, side = Writer(server), begin()
    side.disk.has_files = has_files
    writer.write(segment(1), segment(2))
    until(lambda: side.knows(1, 2))
    server.client().delete(writer.store.segment_key(segment(1)))
    side.news._renewed_at = -1e9
    until(lambda: SegmentId(1) not in side.disk.shared)
    until(lambda: side.knows(1, 2) if has_files else side.knows(2))
