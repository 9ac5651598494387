"""Requests of the proxy's own: sent like any, reported to whoever sent them, and unknown afterwards."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from delta_tree import TokenIds, token_ids
from kvshare.errors import UpstreamError
from kvshare.fleet import own_requests
from kvshare.fleet.own_requests import OwnAnswer, OwnRequests
from kvshare.fleet.replica import Replica
from kvshare.sharing.plan import NoPlan
from kvshare.vllm_protocol.messages import FinishedReport, Prefilled
from kvshare.vllm_protocol.salts import owner_salt
from tests.fake_vllm import FakeVllm
from tests.kvshare.fleet.served_fleet import OWNER, ServedFleet, eventually

TOKENS = token_ids(np.arange(3, 103))


@pytest.fixture
async def replica(fleet: ServedFleet) -> Replica:
    return fleet.replica


@pytest.fixture
def own(fleet: ServedFleet) -> OwnRequests:
    """Those whose reports the fleet's journal brings."""
    return fleet.engine.server.measurement.own_requests


async def sent(
    own: OwnRequests, replica: Replica, tokens: TokenIds = TOKENS, *, store: bool = False
) -> OwnAnswer:
    return await own.send(replica, tokens, NoPlan(), store=store)


async def test_it_is_answered_timed_and_reported(own: OwnRequests, replica: Replica, vllm: FakeVllm) -> None:
    """With one token, under a salt and in a namespace that no key has."""
    answer = await sent(own, replica, store=True)
    (seen,) = vllm.generated
    assert seen.body["prompt"] == TOKENS.tolist()
    assert (seen.body["max_tokens"], seen.body["stream"]) == (1, True)
    assert seen.ticket is not None
    assert (seen.ticket.from_memory, seen.ticket.store) == (True, True)
    assert seen.ticket.namespace != replica.namespace(OWNER).digest
    assert seen.body["cache_salt"] != owner_salt(OWNER)
    assert answer.finished.ticket_id == seen.ticket.ticket_id
    assert len(answer.finished.stored) == 2
    assert (answer.progress.prefill_s or 0) > 0
    assert answer.progress.was_alone
    assert not replica.requests


async def test_those_of_one_server_share_with_each_other(
    own: OwnRequests, replica: Replica, vllm: FakeVllm
) -> None:
    """And those of another one are in another namespace."""
    await sent(own, replica)
    await sent(own, replica)
    other = OwnRequests()
    asking = asyncio.create_task(sent(other, replica))
    await eventually(lambda: len(vllm.tickets) == 3)
    first, second, third = vllm.tickets
    assert first.namespace == second.namespace != third.namespace
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def test_it_is_stored_nowhere_here(
    own: OwnRequests, replica: Replica, fleet: ServedFleet, vllm: FakeVllm
) -> None:
    """No node, no count; it knows the segments, so that they can be dropped."""
    answer = await sent(own, replica, store=True)
    await fleet.engine.settle()
    assert fleet.nodes == ()
    assert fleet.counts.executions.total() == 0
    assert {entry.segment_id for entry in answer.finished.stored} == set(vllm.segments)


def test_only_what_is_awaited_is_taken() -> None:
    """Reports of others are of others."""
    own = OwnRequests()
    assert not own.take(FinishedReport("r", "full", None))
    assert not own.take(Prefilled("r", (), ()))


async def test_a_prefill_is_taken_and_is_not_the_report() -> None:
    """A second report changes nothing; after the end it is of an unknown request."""
    own = OwnRequests()
    first, second = FinishedReport("r", "full", None), FinishedReport("r", "exact", None)
    with own._expecting("r") as report:
        assert own.take(Prefilled("r", (), ()))
        assert not report.done()
        assert own.take(first)
        assert own.take(second)
        assert await report == first
    assert not own.take(second)


async def test_a_replica_that_is_gone_is_not_asked(
    own: OwnRequests, replica: Replica, vllm: FakeVllm
) -> None:
    replica.models = None
    with pytest.raises(UpstreamError, match="does not serve any more"):
        await sent(own, replica)
    assert vllm.generated == []


async def test_one_that_vanishes_in_the_middle_leaves_nothing_behind(
    own: OwnRequests, replica: Replica, vllm: FakeVllm
) -> None:
    """Neither a request at the replica nor one that is awaited."""
    vllm.prefill.clear()
    asking = asyncio.create_task(sent(own, replica))
    await eventually(lambda: len(vllm.generated) == 1)
    assert len(replica.requests) == 1
    await vllm.stop()
    vllm.prefill.set()
    with pytest.raises(UpstreamError):
        await asking
    assert (own._awaited, replica.requests) == ({}, set())


async def test_a_report_that_does_not_come_is_not_waited_for_for_ever(
    own: OwnRequests, replica: Replica, vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_requests, "_REPORT_S", 0.05)
    vllm.behaviour.silent = True
    with pytest.raises(TimeoutError):
        await sent(own, replica)
    assert own._awaited == {}
