"""The fleet as an engine: its settings, its start and stop, its status, and who is waited for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from delta_tree import token_ids
from kvshare.errors import ConfigError, ShuttingDownError, StoreError
from kvshare.fleet.engine import VllmEngine
from kvshare.fleet.known_disks import KnownDisks
from kvshare.fleet.routed_request import Incoming
from kvshare.part_problems import PartProblem
from kvshare.parts import ServedPart
from kvshare.requests import Prompt, SharingMode
from kvshare.settings import load_settings
from kvshare.status import ModelCard
from tests.fake_vllm import Behaviour, FakeVllm, running_vllm
from tests.kvshare.fleet.http_servers import unused_port
from tests.kvshare.fleet.served_fleet import FORM, OTHER, OWNER, SETTINGS, ServedFleet, eventually, serving
from vector_index import PromptText

URL = "http://127.0.0.1:9"


def engine_of(*rows: dict[str, Any], **changes: object) -> VllmEngine:
    given = {name.replace("__", "."): value for name, value in changes.items()}
    return VllmEngine(load_settings(overrides={**SETTINGS, "vllm.replicas": list(rows), **given}))


class TestSettings:
    """What is refused before anything is started."""

    def test_a_shared_store_is_not_ignored(self) -> None:
        """It is each vLLM's: the error says how to give it to them, and shows no address."""
        with pytest.raises(ConfigError, match="kvshare vllm MODEL --shared-tier URL") as raised:
            engine_of({"url": URL}, shared_tier__url="redis://store.example:6379/0")
        assert raised.value.key_path == "shared_tier.url"
        assert "store.example" not in str(raised.value)

    def test_a_fleet_has_a_replica(self) -> None:
        with pytest.raises(
            ConfigError, match="expected at least one; add it, or give --vllm-url URL"
        ) as raised:
            engine_of()
        assert raised.value.key_path == "vllm.replicas"

    @pytest.mark.parametrize(
        "rows",
        [
            [{"url": URL, "name": "a"}, {"url": "http://127.0.0.1:19", "name": "a"}],
            [{"url": URL}, {"url": URL}],
            [
                {"url": URL, "name": "a", "data_parallel_size": 2},
                {"url": "http://127.0.0.1:19", "name": "a-dp1"},
            ],
        ],
    )
    def test_two_of_one_name_would_be_one_in_the_tree(self, rows: list[dict[str, Any]]) -> None:
        with pytest.raises(ConfigError, match="two of them are named alike"):
            engine_of(*rows)

    @pytest.mark.parametrize(
        ("row", "ports", "at"),
        [
            ({"url": "http://127.0.0.1:8123"}, {"server__port": 8123}, "vllm.replicas.1.url"),
            ({"url": "http://localhost:8123"}, {"server__admin_port": 8123}, "vllm.replicas.1.url"),
            ({"url": "http://127.0.0.1:8122"}, {"server__port": 8123}, "vllm.replicas.1.control_url"),
            (
                {
                    "url": "http://127.0.0.1:8000",
                    "control_url": "http://127.0.0.1:8122",
                    "data_parallel_size": 2,
                },
                {"server__port": 8123},
                "vllm.replicas.1.control_url",
            ),
        ],
        ids=["its port", "its admin port", "the port after", "a rank's"],
    )
    def test_a_server_does_not_ask_itself(self, row: dict[str, Any], ports: dict[str, int], at: str) -> None:
        """As far as addresses tell; requests would go round."""
        with pytest.raises(ConfigError, match="is this server itself") as raised:
            engine_of({"url": "http://127.0.0.1:7000"}, row, server__host="127.0.0.1", **ports)
        assert raised.value.key_path == at

    def test_each_rank_is_a_replica_with_a_public_name_without_an_address(self) -> None:
        engine = engine_of(
            {"url": "http://10.0.0.1:8000"},
            {"url": "http://10.0.0.2:8000", "data_parallel_size": 2},
            {"url": "http://10.0.0.3:8000", "name": "gpu", "data_parallel_size": 2},
        )
        assert [(each.name, each.public_name, each.control.url) for each in engine.fleet.replicas] == [
            ("10.0.0.1:8000", "1", "http://10.0.0.1:8001"),
            ("10.0.0.2:8000-dp0", "2-dp0", "http://10.0.0.2:8001"),
            ("10.0.0.2:8000-dp1", "2-dp1", "http://10.0.0.2:8002"),
            ("gpu-dp0", "gpu-dp0", "http://10.0.0.3:8001"),
            ("gpu-dp1", "gpu-dp1", "http://10.0.0.3:8002"),
        ]


class TestStartAndStop:
    async def test_before_its_start_and_after_its_end_it_is_not_ready(self, vllm: FakeVllm) -> None:
        """And has no parts to ask."""
        engine = engine_of(vllm.settings, store__path=None)
        for _ in range(2):
            assert (engine.status().ready, engine.status().detail) == (False, "starting or stopped")
            with pytest.raises(ShuttingDownError):
                _ = engine.server
            await engine.start()
            assert engine.status().ready
            await engine.stop()
        assert not engine.status().ready

    async def test_it_starts_with_nobody_there_and_serves_who_comes(
        self, vllm: FakeVllm, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        await vllm.stop()
        async with serving(tmp_path, vllm, wait=False) as fleet:
            assert not fleet.engine.status().ready
            assert fleet.engine.card.model_id == "unknown until a replica answers"
            assert "not ready: no replica serves yet; check vllm.replicas" in caplog.text
            await vllm.start()
            await eventually(lambda: fleet.replica.shares)
            assert fleet.engine.status().ready
            assert fleet.engine.card == ModelCard("tiny", fleet.engine._created, 4096)

    async def test_a_start_that_fails_closes_what_was_open(self, vllm: FakeVllm, tmp_path: Path) -> None:
        """As on a store that another one has open: that goes on, and afterwards the next one can start."""
        second = engine_of(vllm.settings, store__path=str(tmp_path))
        async with serving(tmp_path, vllm) as fleet:
            with pytest.raises(StoreError):
                await second.start()
            await second.stop()
            assert (await fleet.report("Rome")).progress.is_complete
        await second.start()
        assert len(second.sharing.tree.nodes()) == 1
        await second.stop()

    async def test_a_stop_waits_for_no_client(self, vllm: FakeVllm, tmp_path: Path) -> None:
        """The server drains before; what still waits for a journal is left."""
        vllm.release.clear()
        async with serving(tmp_path, vllm) as fleet:
            asking = asyncio.create_task(fleet.send(FORM))
            await eventually(lambda: len(vllm.generated) == 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        vllm.release.set()


class TestStatus:
    async def test_it_says_what_each_replica_does(self, tmp_path: Path) -> None:
        """By name; in all, what they hold and may hold."""
        async with (
            running_vllm(Behaviour(max_bytes=1000, max_disk_bytes=5000)) as one,
            running_vllm(Behaviour(refusals=("no",), max_bytes=2000)) as two,
            serving(
                tmp_path, {**one.settings, "name": "one"}, {**two.settings, "name": "two"}, wait=False
            ) as fleet,
        ):
            await eventually(lambda: all(each.is_connected and each.serves for each in fleet.replicas))
            fleet.replicas[1].num_inflight = 3
            status = fleet.engine.status()
            assert (status.ready, status.detail) == (True, "2 of 2 replicas serve, 1 share")
            assert (status.num_running, status.num_pending_tickets) == (3, 0)
            assert status.kv_budget_bytes == 5000 + 2000
            assert [(each.name, each.serves, each.shares, each.num_inflight) for each in status.replicas] == [
                ("one", True, True, 0),
                ("two", True, False, 3),
            ]
            parts = [(each.part, each.name, each.problem) for each in status.parts[:3]]
            assert parts == [
                (ServedPart.REPLICA, "one", None),
                (ServedPart.DISK, "one", None),
                (ServedPart.REPLICA, "two", PartProblem.REPLICA_UNSHARED),
            ]

    async def test_an_owners_namespaces_are_one_at_each_replica(self, tmp_path: Path) -> None:
        """Of those that are known; these are what its quota counts."""
        async with running_vllm() as one, running_vllm() as two, serving(tmp_path, one, two) as fleet:
            assert set(fleet.engine.digests_of(OWNER)) == {
                each.namespace(OWNER).digest for each in fleet.replicas
            }
            fleet.replicas[0].info = None
            assert len(fleet.engine.digests_of(OWNER)) == 1

    async def test_what_is_held_is_counted_for_its_replica(self, fleet: ServedFleet, vllm: FakeVllm) -> None:
        await fleet.report("Rome")
        (status,) = fleet.engine.status().replicas
        assert (status.num_segments, status.kv_bytes) == (2, fleet.engine.status().kv_bytes)
        assert status.kv_bytes == 64 * sum(len(tokens) for _, tokens in vllm.segments.values())

    async def test_a_plan_is_explained_and_not_sent(self, fleet: ServedFleet, vllm: FakeVllm) -> None:
        """With the replica that would get it; None where none shares."""
        await fleet.report("Rome")
        prompt = Prompt(token_ids(list(FORM.format(place="Oslo").encode())), PromptText("", ""))
        incoming = Incoming(OWNER, prompt, SharingMode.APPROX)
        assert (await fleet.engine.explain(incoming))["replica"] == fleet.replica.name
        assert len(vllm.generated) == 1
        fleet.replica.is_connected = False
        assert (await fleet.engine.explain(incoming))["replica"] is None


class TestUnclaimed:
    """Prompts of the last run, until their replicas have said what they hold."""

    async def test_those_of_a_replica_that_is_not_there_any_more_leave(
        self, vllm: FakeVllm, tmp_path: Path
    ) -> None:
        """When all others have said what they hold: nobody is waited for longer."""
        async with serving(tmp_path, vllm) as fleet:
            await fleet.report("Rome")
            await fleet.ask(OTHER)
        gone = next(iter(vllm.segments))
        del vllm.segments[gone]
        async with serving(tmp_path, vllm) as fleet:
            await eventually(lambda: len(fleet.nodes) == 1)
            assert gone not in fleet.nodes[0].pieces.segment_ids

    async def test_one_that_had_a_disk_is_waited_for_and_the_log_says_so(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """However long it takes. One without is waited for `lost_after_s` only."""
        async with running_vllm(Behaviour(max_disk_bytes=10**8)) as vllm:
            row = {**vllm.settings, "name": "a"}
            async with serving(tmp_path, row) as fleet:
                await fleet.report("Rome")
            await vllm.stop()
            async with serving(tmp_path, row, wait=False, vllm__lost_after_s=0.05) as fleet:
                await eventually(lambda: "waiting for replica a, which had KV on a disk" in caplog.text)
                assert len(fleet.nodes) == 1
                await vllm.start()
                await eventually(lambda: fleet.replica.shares)
                assert len(fleet.nodes) == 1

    async def test_a_replica_that_is_no_setting_any_more_is_not_waited_for(self, tmp_path: Path) -> None:
        """Whatever the file of disks says of it."""
        async with running_vllm() as vllm, serving(tmp_path, {**vllm.settings, "name": "old"}) as fleet:
            await fleet.report("Rome")
        await asyncio.to_thread(lambda: KnownDisks(str(tmp_path)).note("old", has_disk=True))
        row = {"url": f"http://127.0.0.1:{await unused_port()}", "name": "new"}
        async with serving(tmp_path, row, wait=False, vllm__lost_after_s=0.05) as fleet:
            await eventually(lambda: not fleet.nodes)
