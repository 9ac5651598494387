"""The fleet measures what a replica costs by requests of its own, of which nothing is left."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import pytest

from kvshare.fleet import own_requests, start_measurement
from kvshare.fleet.replica import Replica
from kvshare.fleet.start_measurement import StartMeasurement
from kvshare.sharing.kept_costs import COSTS_FILE
from kvshare.vllm_protocol.salts import owner_salt
from tests.fake_vllm import Behaviour, FakeVllm, Seen, covered, running_vllm
from tests.kvshare.fleet.served_fleet import FORM, OWNER, ServedFleet, eventually, serving

ALL = {"prefill", "pass", "load"}
MEASURING: dict[str, Any] = {"cost__measure_at_start": True}
LENGTHS = [256, 256, 256, 2048, 2048, 4095, 4095]  # the first one has cold caches


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """No second of silence before each request. A long prefill is none of a busy machine."""
    monkeypatch.setattr(start_measurement, "_LONG_S", 3600.0)
    monkeypatch.setattr(start_measurement, "_QUIET_S", 0.02)
    monkeypatch.setattr(start_measurement, "_POLL_S", 0.005)


@asynccontextmanager
async def measured(
    vllm: FakeVllm, store: Path, *, num_sent: int = 7, **overrides: object
) -> AsyncIterator[ServedFleet]:
    """A fleet that has sent so many requests of its own."""
    async with serving(store, vllm, **{**MEASURING, **overrides}) as fleet:
        await eventually(lambda: len(vllm.generated) >= num_sent)
        await eventually(lambda: not fleet.engine.server.measurement.own_requests._awaited)
        await eventually(lambda: not vllm.segments)
        yield fleet


def num_tokens(seen: Seen) -> int:
    return len(seen.body["prompt"])


async def test_prefills_loads_and_passes_are_measured(vllm: FakeVllm, tmp_path: Path) -> None:
    """Of three lengths each, before any client has asked."""
    async with measured(vllm, tmp_path) as fleet:
        await eventually(lambda: fleet.engine.sharing.cost.measured == ALL)
        rows = fleet.engine.sharing.cost.rows()
    assert [num_tokens(seen) for seen in vllm.generated] == LENGTHS
    assert sorted({features[1] for kind, features, _ in rows["work"] if kind == "prefill"}) == [
        256,
        2048,
        4095,
    ]
    loaded = [features[1] for _, features, _ in rows["memory"]]
    assert loaded == [64 * (length - 4 * 16) for length in (256, 2048, 4095)]
    assert [seconds for kind, _, seconds in rows["work"] if kind == "bare pass"] == [0.01] * 3


async def test_the_near_duplicates_are_plans_like_any(vllm: FakeVllm, tmp_path: Path) -> None:
    """Copies of what the prompt before has stored, without the tokens that are changed."""
    async with measured(vllm, tmp_path):
        pass
    *_, whole, near = vllm.generated
    assert near.ticket is not None
    assert [(span.start, span.end) for span in covered(near.ticket)] == [
        (0, 1007),
        (1023, 2031),
        (2047, 3055),
        (3071, 4079),
    ]
    a, b = whole.body["prompt"], near.body["prompt"]
    changed = {place for place in range(4095) if a[place] != b[place]}
    assert changed
    assert all(any(start <= place < start + 16 for start in (1007, 2031, 3055, 4079)) for place in changed)
    assert not near.ticket.is_exact
    assert near.ticket.from_memory  # or nothing would be known of host memory


async def test_nothing_is_left_of_them(vllm: FakeVllm, tmp_path: Path) -> None:
    """Neither in tree and index, nor at the replica, nor in what operators count."""
    async with measured(vllm, tmp_path) as fleet:
        status = fleet.engine.status()
        assert (status.num_nodes, status.num_segments, status.kv_bytes) == (0, 0, 0)
        assert (status.num_running, status.num_pending_tickets) == (0, 0)
        counts = fleet.counts
        counted = (counts.tickets, counts.executions, counts.evictions, counts.unshared, counts.fallbacks)
        assert sum(each.total() for each in counted) == 0
        await fleet.engine.settle()
        assert fleet.nodes == ()
    assert len(vllm.dropped) >= 6


async def test_no_key_reaches_them(vllm: FakeVllm, tmp_path: Path) -> None:
    """Their salts and namespaces are random, so a client that sends the same tokens shares nothing."""
    async with measured(vllm, tmp_path) as fleet:
        own = vllm.generated[-2]
        await fleet.ask(bytes(own.body["prompt"]).decode("ascii"))
    (client,) = vllm.generated[7:]
    assert client.ticket is not None
    assert own.ticket is not None
    assert client.ticket.prompt_digest == own.ticket.prompt_digest
    assert client.ticket.copies == ()
    assert client.body["cache_salt"] == owner_salt(OWNER)
    assert owner_salt(OWNER) not in {seen.body["cache_salt"] for seen in vllm.generated[:7]}
    namespaces = {seen.ticket.namespace for seen in vllm.generated[:7] if seen.ticket is not None}
    assert len(namespaces) == 1
    assert client.ticket.namespace not in namespaces


async def test_costs_are_kept_and_not_measured_again(
    vllm: FakeVllm, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By the next proxy in front of the same vLLM; another version of it is measured."""
    caplog.set_level(logging.INFO)
    async with measured(vllm, tmp_path) as fleet:
        await eventually(lambda: "requests of our own" in caplog.text)
        rows = fleet.engine.sharing.cost.rows()
    assert (tmp_path / COSTS_FILE).exists()
    async with serving(tmp_path, vllm, **MEASURING) as fleet:
        assert fleet.engine.sharing.cost.rows() == rows
        assert fleet.engine.sharing.costs()["machine"] == "a device"
        assert not fleet.engine.server.measurement._is_wanted.is_set()
    assert len(vllm.generated) == 7
    vllm.behaviour.device = "another device"
    await vllm.restart()
    async with measured(vllm, tmp_path, num_sent=14):
        pass
    document = json.loads((tmp_path / COSTS_FILE).read_text())
    assert len(document["kept"]) == 2


async def test_a_replica_with_requests_is_not_measured(
    vllm: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before their last one has ended."""
    quiet_s = start_measurement._QUIET_S
    monkeypatch.setattr(start_measurement, "_QUIET_S", 3600.0)
    vllm.release.clear()
    async with serving(tmp_path, vllm, **MEASURING) as fleet:
        asking = asyncio.create_task(fleet.send(FORM))
        await eventually(lambda: len(vllm.generated) == 1)
        monkeypatch.setattr(start_measurement, "_QUIET_S", quiet_s)
        await asyncio.sleep(0.2)  # ten times as long as it would have to be idle
        assert len(vllm.generated) == 1
        vllm.release.set()
        await asking
        await eventually(lambda: len(vllm.generated) == 8)


async def test_one_that_is_never_idle_is_given_up(
    vllm: FakeVllm, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a line in the log: costs are learned from what its clients ask."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(start_measurement, "_PATIENCE_S", 0.1)
    monkeypatch.setattr(start_measurement, "_QUIET_S", 60.0)
    async with serving(tmp_path, vllm, **MEASURING):
        await eventually(lambda: "no replica was idle" in caplog.text)
    assert vllm.generated == []


class FromTheSecondOn(asyncio.Event):
    """What requests wait for, except the first one, which is not counted."""

    def __init__(self, vllm: FakeVllm) -> None:
        super().__init__()
        self._vllm = vllm

    async def wait(self) -> Literal[True]:
        return True if len(self._vllm.generated) < 2 else await super().wait()


async def test_a_prefill_that_was_not_alone_is_sent_again(vllm: FakeVllm, tmp_path: Path) -> None:
    """With other tokens, as vLLM's own cache has the first ones. What a client asks waits for one at most."""
    vllm.prefill = FromTheSecondOn(vllm)
    async with serving(tmp_path, vllm, **MEASURING) as fleet:
        await eventually(lambda: len(vllm.generated) == 2)
        asking = asyncio.create_task(fleet.send(FORM))
        await eventually(lambda: len(vllm.generated) == 3)
        vllm.prefill.set()
        await asking
        await eventually(lambda: len(vllm.generated) == 9)
        await eventually(lambda: not fleet.engine.server.measurement.own_requests._awaited)
        assert fleet.engine.sharing.cost.measured >= ALL
    own = [tuple(seen.body["prompt"]) for seen in vllm.generated if isinstance(seen.body["prompt"], list)]
    assert len(set(own)) == len(own) == len(LENGTHS) + 1


@pytest.mark.parametrize(
    "behaviour",
    [
        Behaviour(status=500),
        Behaviour(status=404),
        Behaviour(die_after_chunks=0),
        Behaviour(die_after_chunks=3),
        Behaviour(silent=True),
    ],
    ids=["fails", "has no such route", "breaks off", "breaks off later", "reports nothing"],
)
async def test_a_replica_that_does_not_answer_costs_one_warning(
    behaviour: Behaviour, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server serves, and learns from its clients."""
    monkeypatch.setattr(own_requests, "_REPORT_S", 0.1)
    async with (
        running_vllm(behaviour) as vllm,
        serving(tmp_path, vllm, **MEASURING) as fleet,
    ):
        await eventually(lambda: "could not be measured" in caplog.text)
        assert not fleet.engine.sharing.cost.measured
        assert len(vllm.generated) == 1
        vllm.behaviour = Behaviour()
        assert (await fleet.send(FORM)).progress.is_complete
    (record,) = (record for record in caplog.records if "measured" in record.getMessage())
    assert record.levelname == "WARNING"


async def test_without_room_only_prefills_are_measured(vllm: FakeVllm, tmp_path: Path) -> None:
    """A replica that is full of its clients' KV does not evict any for it."""
    vllm.behaviour.max_bytes = 1000 * 64
    async with measured(vllm, tmp_path, num_sent=5) as fleet:
        await eventually(lambda: len(vllm.generated) == 5)
        assert fleet.engine.sharing.cost.measured == ALL  # from 256 tokens
    assert [num_tokens(seen) for seen in vllm.generated] == [256, 256, 256, 2048, 4095]
    assert [ticket.store for ticket in vllm.tickets] == [False, True, True, False, False]


async def test_after_a_long_prefill_no_longer_one_is_sent(
    vllm: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A slow replica is not kept from its clients for minutes."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(start_measurement, "_LONG_S", 0.0)
    async with serving(tmp_path, vllm, **MEASURING):
        await eventually(lambda: "measured by 3 requests of our own" in caplog.text)
    assert [num_tokens(seen) for seen in vllm.generated] == [256, 256, 256]


@pytest.mark.parametrize("setting", [None, "cost__measure_at_start", "cost__learn"])
async def test_what_need_not_be_measured_is_not(
    setting: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Switched off by its own setting, or nothing is learned; or the replica shares nothing."""
    begun: list[str] = []

    async def begin(self: StartMeasurement, replica: Replica) -> None:
        begun.append(replica.name)

    monkeypatch.setattr(StartMeasurement, "_measure", begin)
    for is_needed in (False, True):
        behaviour = Behaviour(refusals=("no",)) if setting is None and not is_needed else Behaviour()
        off = {} if setting is None else {setting: is_needed}
        async with (
            running_vllm(behaviour) as vllm,
            serving(tmp_path, vllm, wait=False, **{**MEASURING, **off}) as fleet,
        ):
            await eventually(lambda fleet=fleet: fleet.replica.is_connected and fleet.replica.serves)  # type: ignore[misc]
            await (eventually(lambda: bool(begun)) if is_needed else asyncio.sleep(0.1))
            assert bool(begun) is is_needed


async def test_of_several_replicas_one_is_measured(vllm: FakeVllm, tmp_path: Path) -> None:
    """They are alike, and there is one set of costs."""
    async with running_vllm() as other, serving(tmp_path, vllm, other, **MEASURING) as fleet:
        await eventually(lambda: len(vllm.generated) + len(other.generated) == 7)
        await eventually(lambda: fleet.engine.sharing.cost.measured == ALL)
        await eventually(lambda: not vllm.segments and not other.segments)
        assert sorted([len(vllm.generated), len(other.generated)]) == [0, 7]


async def test_a_fleet_stops_in_the_middle_of_it(vllm: FakeVllm, tmp_path: Path) -> None:
    """At once: it waits for no answer to its own request."""
    vllm.prefill.clear()
    async with asyncio.timeout(60), serving(tmp_path, vllm, **MEASURING):
        await eventually(lambda: len(vllm.generated) == 1)
    vllm.prefill.set()
    assert len(vllm.generated) == 1
