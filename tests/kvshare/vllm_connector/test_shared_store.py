"""Real vLLM over a store that vLLMs share: another one loads what one has computed, near and exact."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from kvshare.vllm_protocol.places import OnDiskOnly
from kvshare.vllm_protocol.salts import private_salt
from tests.kvshare.vllm_connector.in_process_vllm import NAMESPACE, Vllm, copies_of, random_text
from tests.redis_server import RedisServer, needs_redis, redis_at

if TYPE_CHECKING:
    from kvshare.vllm_protocol.messages import FinishedReport
    from tests.kvshare.vllm_connector.in_process_vllm import Start

pytestmark = needs_redis
LIMIT = 1e-4
SCATTERED = ((0, 100), (130, 300), (301, 500), (520, 590))
NUM_TOKENS, NUM_DONORS = 600, 5
WAIT_S = 60.0


@dataclass(frozen=True)
class Joined:
    """A vLLM that has computed nothing, and what an earlier one reported of the prompts that it stored."""

    vllm: Vllm
    donors: tuple[FinishedReport, ...]
    server: RedisServer

    def tokens(self, number: int) -> list[int]:
        return random_text(NUM_TOKENS, 300 + number)

    def values(self, number: int) -> list[bytes]:
        """The names in the store of a donor's segments."""
        side = self.vllm.side
        assert side.scheduler.news is not None
        store = side.scheduler.news._store
        known = side.scheduler.disk.shared
        return [store.segment_key(known[each.segment_id]).encode() for each in self.donors[number].stored]


@pytest.fixture(scope="module")
def joined(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Joined]:
    folder = tmp_path_factory.mktemp("redis")
    key = folder / "key"
    key.write_text("ab" * 32)
    with redis_at(folder) as server:
        given = server.settings(seal_key_file=str(key), timeout_s=0.5).model_dump()
        first = start(shared_tier=given, run=11)
        donors = tuple(first.store(random_text(NUM_TOKENS, 300 + number)) for number in range(NUM_DONORS))
        ids = [segment.segment_id for donor in donors for segment in donor.stored]
        deadline = time.monotonic() + WAIT_S
        while not all(segment_id in first.side.segments.disk for segment_id in ids):
            assert time.monotonic() < deadline
            time.sleep(0.02)
            first.plain([3, 4, 5])  # what was written is reported with a step
        first.check_idle()
        place = first.side.info().shared_store
        second = start(shared_tier=given, run=12)
        info = second.side.info()
        assert (info.shared_store, info.max_disk_bytes) == (place, given["max_bytes"])
        assert place
        assert sorted(second.side.segments.ids()) == sorted(ids)
        assert second.side.segments.num_bytes == 0
        yield Joined(second, donors, server)
        second.check_idle()


def test_the_proxy_is_told_what_was_found(joined: Joined) -> None:
    """With the bytes of each segment, which only another vLLM has told before."""
    events = [event for event in joined.vllm.events() if isinstance(event, OnDiskOnly) and event.num_bytes]
    told = {
        segment_id: num_bytes
        for event in events
        for segment_id, num_bytes in zip(event.came, event.num_bytes, strict=True)
    }
    assert told == {each.segment_id: each.num_bytes for donor in joined.donors for each in donor.stored}


def test_a_near_duplicate_of_anothers_prompt(joined: Joined) -> None:
    """Its copies are read from the store, its answer is that of a full prefill; then they are in memory."""
    vllm, tokens = joined.vllm, joined.tokens(0)
    plan = copies_of(joined.donors[0], *SCATTERED)
    expected = vllm.plain(tokens)
    for is_far in (True, False):
        answer, event = vllm.shared(tokens, plan)
        assert answer.distance(expected) <= LIMIT
        assert (event.decision, event.used) == ("approx", tuple(range(len(plan))))
        assert (event.disk_bytes > 0) is is_far
        vllm.forget_blocks()


def test_an_exact_prefix_of_anothers_prompt(joined: Joined) -> None:
    vllm, tokens = joined.vllm, joined.tokens(1)
    ticket = vllm.ticket(tokens, copies_of(joined.donors[1], (0, 590)), exact_length=590)
    (answer,) = vllm.ask((tokens, ticket, vllm.fresh("tenant")))
    event = vllm.finished(ticket)
    assert answer.distance(vllm.plain(tokens)) <= LIMIT
    assert (event.decision, event.num_computed) == ("exact", 10)
    assert event.disk_bytes


def test_another_namespace_gets_nothing(joined: Joined) -> None:
    vllm, tokens = joined.vllm, joined.tokens(2)
    plan = copies_of(joined.donors[2], (0, 590))
    ticket = vllm.ticket(tokens, plan, exact_length=590, namespace=f"not-{NAMESPACE}")
    vllm.ask((tokens, ticket, vllm.fresh("tenant")))
    event = vllm.finished(ticket)
    assert (event.decision, event.disk_bytes) == ("full", 0)


def test_a_changed_value_is_computed(joined: Joined) -> None:
    """The proxy is told that this vLLM has it no more."""
    vllm, tokens, client = joined.vllm, joined.tokens(2), joined.server.client()
    name = joined.values(2)[0]
    raw = bytearray(client.get(name))
    raw[-1000] ^= 1
    client.set(name, bytes(raw))
    answer, event = vllm.shared(tokens, copies_of(joined.donors[2], *SCATTERED))
    assert answer.distance(vllm.plain(tokens)) <= LIMIT
    gone = joined.donors[2].stored[0].segment_id
    assert (event.reason, gone in vllm.dropped()) == ("segments_gone", True)


def test_what_the_proxy_drops_leaves_the_store(joined: Joined) -> None:
    """For all who share it."""
    vllm, client, names = joined.vllm, joined.server.client(), joined.values(3)
    assert all(client.exists(name) for name in names)
    assert vllm.side.scheduler.news is not None
    ids = [segment.segment_id for segment in joined.donors[3].stored]
    vllm.side.scheduler.news.note_dropped(ids)
    vllm.side.scheduler.drop(ids)
    deadline = time.monotonic() + WAIT_S
    while any(client.exists(name) for name in names):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert not set(ids) & set(vllm.side.segments.ids())
    vllm.settle()


def test_a_store_that_hangs_is_not_waited_for(joined: Joined) -> None:
    """Its tokens are computed and nothing is dropped; the next prompt has them when it answers again."""
    vllm, tokens = joined.vllm, joined.tokens(4)
    plan = copies_of(joined.donors[4], *SCATTERED)
    joined.server.process.send_signal(signal.SIGSTOP)
    try:
        ticket = vllm.ticket(tokens, plan, disk_s=0.02)
        (answer,) = vllm.ask((tokens, ticket, private_salt(ticket.ticket_id)))
        event = vllm.finished(ticket)
        assert answer.distance(vllm.plain(tokens)) <= LIMIT
        assert (event.decision, event.reason, event.used) == ("full", "kv_late", ())
    finally:
        joined.server.process.send_signal(signal.SIGCONT)
    deadline = time.monotonic() + WAIT_S
    while event.decision != "approx":
        assert time.monotonic() < deadline
        time.sleep(0.5)
        answer, event = vllm.shared(tokens, plan)
        assert answer.distance(vllm.plain(tokens)) <= LIMIT
    assert not {copy.segment_id for copy in plan} & vllm.dropped()


def test_a_store_that_is_killed_costs_what_is_in_it(joined: Joined) -> None:
    """Requests go on, and what is in memory is shared."""
    vllm, donor = joined.vllm, joined.tokens(0)
    vllm.shared(donor, copies_of(joined.donors[0], *SCATTERED))  # it is in memory, whatever ran before
    joined.server.kill()
    answer, event = vllm.shared(donor, copies_of(joined.donors[0], *SCATTERED))
    assert answer.distance(vllm.plain(donor)) <= LIMIT
    assert event.decision == "approx"
    own = random_text(NUM_TOKENS, 399)
    stored = vllm.store(own)
    answer, event = vllm.shared(own, copies_of(stored, *SCATTERED))
    assert answer.distance(vllm.plain(own)) <= LIMIT
    assert event.decision == "approx"
