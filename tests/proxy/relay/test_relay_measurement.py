"""The proxy measures what a replica costs by requests of its own, of which nothing is left."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvshare.fleet import own_requests, start_measurement
from kvshare.sharing.kept_costs import COSTS_FILE
from tests.fake_vllm import Behaviour, FakeVllm, Seen, covered, running_vllm
from tests.proxy.conftest import eventually
from tests.proxy.relay.relay_server import LOCAL_SALT, Relay, chat_body, running_relay

ALL = {"prefill", "pass", "load"}
# Whatever a quick fake takes, every plan is made.
MEASURING: dict[str, Any] = {"cost__measure_at_start": True, "cost__min_saved_s": -60.0}
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
) -> AsyncIterator[Relay]:
    """A proxy that has sent so many requests of its own."""
    async with running_relay(store, vllm, **{**MEASURING, **overrides}) as relay:
        await eventually(lambda: len(vllm.generated) >= num_sent)
        await eventually(lambda: not relay.engine.server.measurement.own_requests._awaited)
        await eventually(lambda: not vllm.segments)
        yield relay


def num_tokens(seen: Seen) -> int:
    return len(seen.body["prompt"])


async def test_prefills_loads_and_passes_are_measured(vllm: FakeVllm, tmp_path: Path) -> None:
    """Of three lengths each, before any client has asked."""
    async with measured(vllm, tmp_path) as relay:
        await eventually(lambda: relay.engine.sharing.cost.measured == ALL)
        rows = relay.engine.sharing.cost.rows()
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
    async with measured(vllm, tmp_path) as relay:
        status = relay.engine.status()
        assert (status.num_nodes, status.num_segments, status.kv_bytes) == (0, 0, 0)
        assert (status.num_running, status.num_pending_tickets) == (0, 0)
        counts = relay.counts
        counted = (counts.tickets, counts.executions, counts.evictions, counts.unshared, counts.fallbacks)
        assert sum(each.total() for each in counted) == 0
        history = await (await relay.send("/admin/requests", method="GET")).json()
        assert history["requests"] == []
        metrics = (await relay.http.get(f"{relay.url}/metrics")).content
        text = (await metrics.read()).decode()
        assert not [line for line in text.splitlines() if 'endpoint="/v1' in line]
        await relay.engine.settle()
        assert relay.num_nodes == 0
    assert len(vllm.dropped) >= 6


async def test_no_key_reaches_them(vllm: FakeVllm, tmp_path: Path) -> None:
    """Their salts and namespaces are random, so a client that sends the same tokens shares nothing."""
    async with measured(vllm, tmp_path) as relay:
        own = vllm.generated[-2]
        body = {"model": "tiny", "prompt": own.body["prompt"], "max_tokens": 1}
        response = await relay.send("/v1/completions", body)
        assert response.status == 200
        assert relay.num_nodes <= 1
    (client,) = vllm.generated[7:]
    assert client.ticket is not None
    assert client.ticket.copies == ()
    assert client.body["cache_salt"] == LOCAL_SALT
    own_salts = {seen.body["cache_salt"] for seen in vllm.generated[:7]}
    assert LOCAL_SALT not in own_salts
    namespaces = {seen.ticket.namespace for seen in vllm.generated[:7] if seen.ticket is not None}
    assert len(namespaces) == 1
    assert client.ticket.namespace not in namespaces


async def test_costs_are_kept_and_not_measured_again(
    vllm: FakeVllm, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By the next proxy in front of the same vLLM; another version of it is measured."""
    caplog.set_level(logging.INFO)
    async with measured(vllm, tmp_path) as relay:
        await eventually(lambda: "requests of our own" in caplog.text)
        rows = relay.engine.sharing.cost.rows()
    assert (tmp_path / COSTS_FILE).exists()
    async with running_relay(tmp_path, vllm, **MEASURING) as relay:
        assert relay.engine.sharing.cost.rows() == rows
        assert relay.engine.sharing.costs()["machine"] == "a device"
        await asyncio.sleep(0.2)
    assert len(vllm.generated) == 7
    vllm.behaviour.device = "another device"
    await vllm.restart()
    async with measured(vllm, tmp_path, num_sent=14):
        pass
    document = json.loads((tmp_path / COSTS_FILE).read_text())
    assert len(document["kept"]) == 2


async def test_a_replica_with_requests_is_not_measured(vllm: FakeVllm, tmp_path: Path) -> None:
    """Not before their last one has ended."""
    vllm.release.clear()
    async with running_relay(tmp_path, vllm, wait=False, **MEASURING) as relay:
        await eventually(lambda: bool(relay.engine.fleet.serving()))
        asking = asyncio.create_task(relay.send("/v1/chat/completions", chat_body("Rome")))
        await eventually(lambda: len(vllm.generated) == 1)
        before = len(vllm.generated)
        await asyncio.sleep(0.2)
        assert len(vllm.generated) == before
        vllm.release.set()
        assert (await asking).status == 200
        await eventually(lambda: len(vllm.generated) == before + 7)


async def test_one_that_is_never_idle_is_given_up(
    vllm: FakeVllm, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a line in the log: costs are learned from what its clients ask."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(start_measurement, "_PATIENCE_S", 0.1)
    monkeypatch.setattr(start_measurement, "_QUIET_S", 60.0)
    async with running_relay(tmp_path, vllm, **MEASURING):
        await eventually(lambda: "no replica was idle" in caplog.text)
    assert vllm.generated == []


async def test_a_prefill_that_was_not_alone_is_sent_again(vllm: FakeVllm, tmp_path: Path) -> None:
    """With other tokens, as vLLM's own cache has the first ones. What a client asks waits for one at most."""
    vllm.prefill.clear()
    async with running_relay(tmp_path, vllm, **MEASURING) as relay:
        await eventually(lambda: len(vllm.generated) == 1)
        vllm.prefill.set()
        await eventually(lambda: len(vllm.generated) == 2)
        vllm.prefill.clear()
        await eventually(lambda: len(vllm.generated) == 3)
        asking = asyncio.create_task(relay.send("/v1/chat/completions", chat_body("Rome")))
        await eventually(lambda: len(vllm.generated) == 4)
        vllm.prefill.set()
        assert (await asking).status == 200
        await eventually(lambda: relay.engine.sharing.cost.measured >= ALL)
        await eventually(lambda: len(vllm.generated) >= 8)
        await eventually(lambda: not relay.engine.server.measurement.own_requests._awaited)
        prompts = [tuple(seen.body["prompt"]) for seen in vllm.generated if seen.path == "/v1/completions"]
    assert len(set(prompts)) == len(prompts)


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
        running_relay(tmp_path, vllm, **MEASURING) as relay,
    ):
        await eventually(lambda: "could not be measured" in caplog.text)
        assert not relay.engine.sharing.cost.measured
        assert len(vllm.generated) == 1
        vllm.behaviour = Behaviour()
        assert (await relay.send("/v1/chat/completions", chat_body("Rome"))).status == 200
    (record,) = (record for record in caplog.records if "measured" in record.getMessage())
    assert record.levelname == "WARNING"


async def test_without_room_only_prefills_are_measured(vllm: FakeVllm, tmp_path: Path) -> None:
    """A replica that is full of its clients' KV does not evict any for it."""
    vllm.behaviour.max_bytes = 1000 * 64
    async with measured(vllm, tmp_path, num_sent=5) as relay:
        await eventually(lambda: len(vllm.generated) == 5)
        assert relay.engine.sharing.cost.measured == ALL  # from 256 tokens
    assert [num_tokens(seen) for seen in vllm.generated] == [256, 256, 256, 2048, 4095]
    assert [ticket.store for ticket in vllm.tickets] == [False, True, True, False, False]


async def test_a_replica_that_shares_nothing_is_not_measured(tmp_path: Path) -> None:
    """Nothing is planned there."""
    async with running_vllm(Behaviour(refusals=("no",))) as vllm:
        async with running_relay(tmp_path, vllm, wait=False, **MEASURING) as relay:
            await eventually(lambda: all(each.is_connected for each in relay.engine.fleet.replicas))
            await asyncio.sleep(0.2)
        assert vllm.generated == []


@pytest.mark.parametrize("setting", ["cost__measure_at_start", "cost__learn"])
async def test_it_can_be_switched_off(setting: str, vllm: FakeVllm, tmp_path: Path) -> None:
    """By its own setting, and where nothing is learned."""
    async with running_relay(tmp_path, vllm, **{**MEASURING, setting: False}):
        await asyncio.sleep(0.2)
    assert vllm.generated == []


async def test_of_several_replicas_one_is_measured(vllm: FakeVllm, tmp_path: Path) -> None:
    """They are alike, and there is one set of costs."""
    async with running_vllm() as other, running_relay(tmp_path, vllm, other, **MEASURING) as relay:
        await eventually(lambda: len(vllm.generated) + len(other.generated) == 7)
        await eventually(lambda: relay.engine.sharing.cost.measured == ALL)
        await eventually(lambda: not vllm.segments and not other.segments)
        await asyncio.sleep(0.2)
        assert sorted([len(vllm.generated), len(other.generated)]) == [0, 7]


async def test_a_proxy_stops_in_the_middle_of_it(vllm: FakeVllm, tmp_path: Path) -> None:
    """At once: it waits for no answer to its own request."""
    vllm.prefill.clear()
    async with asyncio.timeout(60), running_relay(tmp_path, vllm, **MEASURING):
        await eventually(lambda: len(vllm.generated) == 1)
    vllm.prefill.set()
    assert len(vllm.generated) == 1
