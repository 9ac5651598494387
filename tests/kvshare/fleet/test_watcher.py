"""
Each state of a replica and what leads to the next: a vLLM that answers, is silent, serves another model; a
connector, behind its real control server, that is connected, refused, restarted, or misses events.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from delta_tree import SegmentId
from kvshare.fleet.reconciler import Reconciler
from kvshare.vllm_protocol.messages import Dropped
from kvshare.vllm_protocol.places import Moved
from tests.fake_vllm import Behaviour, FakeVllm, running_vllm
from tests.kvshare.fleet.http_servers import unused_port
from tests.kvshare.fleet.real_control import FIELDS, RealControl
from tests.kvshare.fleet.served_fleet import ServedFleet, eventually, serving, watching


def lines(caplog: pytest.LogCaptureFixture, part: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if part in record.getMessage()]


def held(fleet: ServedFleet) -> set[int]:
    return set(fleet.engine.server.runtime.keeper.tier.held_by("a"))


class TestConnection:
    """From no connector to one whose journal is read."""

    async def test_what_a_connector_holds_and_says_is_known_when_it_is_connected(
        self, vllm: FakeVllm, control: RealControl, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        control.hold(1, 2)
        control.changes = {"warnings": ("the disk is slow",)}
        async with watching(vllm, control) as fleet:
            await eventually(lambda: fleet.replica.shares)
            assert held(fleet) == {1, 2}
            assert fleet.replica.info == control.info()
            assert fleet.watcher.was_connected.is_set()
            assert fleet.watcher.has_listed.is_set()
        assert lines(caplog, "connected") == ["replica a: connected, 2 segments (vllm 0.32.0)"]
        assert lines(caplog, "the disk is slow") == ["replica a: the disk is slow"]

    async def test_what_it_warns_of_later_is_known_too(
        self, watched: ServedFleet, control: RealControl, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A shared store that goes away, which is in no event."""
        monkeypatch.setattr("kvshare.fleet.watcher._INFO_EVERY_S", 0.0)
        control.changes = {"warnings": ("the store is away",)}
        control.tell(Moved((SegmentId(1),)))
        await eventually(lambda: watched.replica.info is not None and bool(watched.replica.info.warnings))
        control.changes = {}
        control.tell(Moved((SegmentId(2),)))
        await eventually(lambda: watched.replica.info is not None and not watched.replica.info.warnings)

    async def test_events_are_applied_in_their_order(
        self, watched: ServedFleet, control: RealControl
    ) -> None:
        """What came and left again is gone."""
        one, two = SegmentId(1), SegmentId(2)
        for event in (Moved((one, two)), Moved((), (one,)), Moved((one,)), Dropped((two,))):
            control.tell(event)
        await eventually(lambda: watched.watcher._last == 4)
        assert watched.replica.in_blocks == {one}

    @pytest.mark.parametrize(
        ("changes", "told"),
        [
            ({"refusals": ("sliding windows",)}, "replica a shares nothing: sliding windows"),
            ({"passing": "drafts"}, "replica a: requests pass unshared: drafts"),
        ],
    )
    async def test_one_that_shares_nothing_is_connected_all_the_same(
        self,
        vllm: FakeVllm,
        control: RealControl,
        changes: dict[str, object],
        told: str,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """Its journal is read; it gets requests, and no plans. Its worker may not know the model's fields."""
        control.changes = {**changes, "namespace_fields": dict.fromkeys(FIELDS, "")}
        async with watching(vllm, control) as fleet:
            await eventually(lambda: fleet.replica.is_connected)
            await eventually(lambda: fleet.replica.serves)
            assert not fleet.replica.shares
        assert lines(caplog, told) == [told]

    @pytest.mark.parametrize(("name", "value"), [("rope", None), ("dtype", "")])
    async def test_one_whose_model_is_not_known_yet_is_waited_for(
        self, vllm: FakeVllm, control: RealControl, name: str, value: str | None
    ) -> None:
        """While it starts: without all of them, KV of different models would meet."""
        fields = {key: text for key, text in FIELDS.items() if key != name}
        control.changes = {"namespace_fields": fields if value is None else {**fields, name: value}}
        async with watching(vllm, control) as fleet:
            await eventually(lambda: fleet.replica.connector_problem is not None)
            assert fleet.replica.connector_problem == f"{name} missing"
            assert not fleet.replica.is_connected
            control.changes = {}
            await eventually(lambda: fleet.replica.shares)
            assert fleet.replica.connector_problem is None

    async def test_each_kind_of_failure_is_logged_once(
        self, vllm: FakeVllm, control: RealControl, caplog: pytest.LogCaptureFixture
    ) -> None:
        """However often it is tried; the part of a server says it as long as it lasts."""
        await control.stop()
        async with watching(vllm, control) as fleet:
            await eventually(lambda: len(lines(caplog, "shares nothing for now")) == 1)
            problem = fleet.replica.connector_problem
            assert problem is not None
            assert problem in lines(caplog, "shares nothing for now")[0]
            control.start(token="secret")
            await eventually(lambda: len(lines(caplog, "shares nothing for now")) == 2)
            assert fleet.replica.connector_problem == "expected status 200, got 401"
            await asyncio.sleep(0.3)  # some more tries
            await control.stop()
            control.start()
            await eventually(lambda: fleet.replica.is_connected)
        assert len(lines(caplog, "got 401")) == 1
        assert "shares again" not in caplog.text  # it is connected for the first time

    async def test_a_connection_that_breaks_is_taken_up_where_it_broke(
        self, watched: ServedFleet, control: RealControl, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The same process: its events are read on, and nothing is asked twice."""
        control.hold(1)
        control.tell(Moved((SegmentId(1),)))
        await eventually(lambda: watched.watcher._last == 1)
        await control.stop()
        await eventually(lambda: not watched.replica.is_connected)
        control.tell(Moved((SegmentId(2),)))
        control.start()
        await eventually(lambda: watched.watcher._last == 2)
        assert watched.replica.in_blocks == {1, 2}  # a new start would have forgotten the first one
        assert len(lines(caplog, "replica a shares again: its connector answers")) == 1

    async def test_a_restarted_process_is_read_from_its_beginning(
        self, watched: ServedFleet, control: RealControl, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Another epoch, though the address is the same and its server never was away."""
        control.hold(1)
        control.tell(Moved((SegmentId(1),)))
        await eventually(lambda: watched.watcher._last == 1)
        control.restart_process()
        control.hold(9)
        await eventually(lambda: held(watched) == {9})
        await eventually(lambda: watched.replica.is_connected)
        assert watched.watcher._last == 0
        assert watched.replica.in_blocks == set()
        assert watched.replica.info is not None
        assert watched.replica.info.epoch == control.events.epoch
        assert len(lines(caplog, "replica a: restarted, its KV in memory is lost")) == 1

    async def test_missed_events_are_made_up_for(
        self, vllm: FakeVllm, control: RealControl, caplog: pytest.LogCaptureFixture
    ) -> None:
        """What it holds is asked for, while it goes on serving and sharing."""
        control.events._events = type(control.events._events)(maxlen=2)
        control.hold(1)
        async with watching(vllm, control) as fleet:
            await eventually(lambda: fleet.replica.shares)
            with control.events._changed:  # nobody reads in between
                control.segments.drop([SegmentId(1)])
                control.hold(2)
                for number in range(5):
                    control.events._events.append(Moved((SegmentId(number),)))
                control.events._last += 5
                control.events._changed.notify_all()
            await eventually(lambda: held(fleet) == {2})
            assert fleet.replica.is_connected
            assert fleet.watcher._last == 5
        assert len(lines(caplog, "replica a: missed events, its segments are read again")) == 1

    async def test_one_that_still_looks_through_its_store_is_asked_when_it_has_done_so(
        self, vllm: FakeVllm, control: RealControl
    ) -> None:
        """It serves and shares meanwhile."""
        control.changes = {"is_listing": True, "shared_store": "s", "max_disk_bytes": 10**6}
        async with watching(vllm, control, vllm__journal_wait_s=0.05) as fleet:
            await eventually(lambda: fleet.replica.shares)
            assert not fleet.watcher.has_listed.is_set()
            control.hold(5)
            control.changes = {**control.changes, "is_listing": False}
            await eventually(fleet.watcher.has_listed.is_set)
            assert held(fleet) == {5}

    async def test_an_event_that_cannot_be_applied_does_not_end_the_watch(
        self,
        watched: ServedFleet,
        control: RealControl,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """All is read again; the log says which error, without what it was about."""

        async def fail(self: Reconciler, *_: object) -> None:
            raise ValueError(" ".join(["the", "prompt's", "text"]))

        with monkeypatch.context() as patch:
            patch.setattr(Reconciler, "apply", fail)
            control.hold(3)
            control.tell(Moved((SegmentId(3),)))
            await eventually(
                lambda: bool(lines(caplog, "applying its journal failed, trying again: ValueError"))
            )
        await eventually(lambda: watched.replica.is_connected)
        assert held(watched) == {3}
        assert "the prompt's text" not in caplog.text


class TestLoss:
    """A connector that is silent for too long."""

    async def test_one_that_is_silent_for_too_long_is_lost_once(
        self, vllm: FakeVllm, control: RealControl, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It is forgotten, and connected like a new one when it is back."""
        control.hold(1)
        async with watching(vllm, control, vllm__lost_after_s=0.05) as fleet:
            await eventually(lambda: held(fleet) == {1})
            await control.stop()
            await eventually(lambda: fleet.replica.info is None)
            assert held(fleet) == set()
            await asyncio.sleep(0.3)
            control.start()
            await eventually(lambda: fleet.replica.shares)
            assert held(fleet) == {1}
        (line,) = lines(caplog, "is lost")
        assert "replica a is lost, and its prompts are evicted: " in line
        assert "Restart that vLLM, or remove it from vllm.replicas" in line

    async def test_one_that_was_never_there_is_not_lost(
        self, vllm: FakeVllm, caplog: pytest.LogCaptureFixture
    ) -> None:
        """There is nothing to evict, and nothing new to say."""
        nowhere = RealControl(port=await unused_port())
        async with watching(vllm, nowhere, vllm__lost_after_s=0.01) as fleet:
            await eventually(lambda: fleet.watcher._silent_since is not None)
            await asyncio.sleep(0.3)
        assert lines(caplog, "is lost") == []

    async def test_a_moment_of_silence_loses_nothing(
        self, watched: ServedFleet, control: RealControl
    ) -> None:
        """And the next one begins at its own beginning."""
        control.hold(1)
        control.tell(Moved((SegmentId(1),)))
        await eventually(lambda: watched.watcher._last == 1)
        for _ in range(2):
            await control.stop()
            await eventually(lambda: watched.watcher._silent_since is not None)
            control.start()
            await eventually(lambda: watched.watcher._silent_since is None)
        assert watched.replica.in_blocks == {1}


async def test_a_start_waits_for_first_answers_and_not_for_good_ones(tmp_path: Path) -> None:
    """A replica that refuses is an answer: a server does not start seconds later for it."""
    async with (
        running_vllm(Behaviour(token="secret")) as vllm,
        serving(tmp_path, vllm, wait=False) as fleet,
    ):
        assert fleet.watcher.asked_vllm.is_set()
        assert fleet.watcher.asked_connector.is_set()
        assert not fleet.watcher.was_connected.is_set()
