"""What a vLLM itself answers: it serves, is silent, comes back, serves another model, or is no vLLM."""

from __future__ import annotations

import logging

import pytest

from tests.fake_vllm import FakeVllm, running_vllm
from tests.kvshare.fleet.http_servers import raw_server, reply
from tests.kvshare.fleet.real_control import RealControl
from tests.kvshare.fleet.served_fleet import ServedFleet, eventually, serving, watching


def lines(caplog: pytest.LogCaptureFixture, part: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if part in record.getMessage()]


class TestHealth:
    """What the vLLM itself answers."""

    async def test_one_that_answers_gets_requests_until_it_does_not(
        self, watched: ServedFleet, vllm: FakeVllm, caplog: pytest.LogCaptureFixture
    ) -> None:
        """And again once it answers; each change is one line."""
        caplog.set_level(logging.INFO)
        replica = watched.replica
        await vllm.stop()
        await eventually(lambda: not replica.serves)
        assert (replica.is_connected, replica.shares) == (True, False)
        await vllm.start()
        await eventually(lambda: replica.shares)
        assert len(lines(caplog, "replica a gets no requests until it answers again")) == 1
        assert lines(caplog, "replica a serves tiny") == ["replica a serves tiny"]

    async def test_what_comes_back_is_asked_for_its_models_and_routes_again(
        self, watched: ServedFleet, vllm: FakeVllm
    ) -> None:
        """It may serve another model, and have been given routes that it lacked."""
        replica = watched.replica
        replica.renders = False
        await vllm.stop()
        await eventually(lambda: not replica.serves)
        vllm.behaviour.names = ("other",)
        await vllm.start()
        await eventually(lambda: replica.serves)
        assert replica.models is not None
        assert (replica.models.names, replica.renders, replica.refusal) == (("other",), True, None)
        assert watched.engine.card.model_id == "other"  # it is the only one

    async def test_one_that_comes_back_with_another_model_than_the_others_is_refused(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Until it serves theirs again."""
        async with running_vllm() as one, running_vllm() as two, serving(None, one, two) as fleet:
            replica = fleet.replica_of(two)
            for name, is_served in (("other", False), ("tiny", True)):
                await two.stop()
                await eventually(lambda: replica.models is None)
                two.behaviour.names = (name,)
                await two.start()
                await eventually(lambda: replica.models is not None)
                assert replica.serves is is_served
                assert len(fleet.engine.fleet.serving()) == 1 + is_served
        (line,) = lines(caplog, "gets no requests: it serves other, the others serve tiny")
        assert "Serve the same model there, or remove the replica" in line

    @pytest.mark.parametrize(
        "answer", [reply(b"{}", status="503 Service Unavailable"), reply(b"no json"), reply(b'{"data": 3}')]
    )
    async def test_what_does_not_list_its_models_does_not_serve(self, answer: bytes) -> None:
        """Whatever it says to `/health`."""
        async with (
            raw_server(answer) as server,
            serving(None, {"url": server.url, "control_url": server.url}, wait=False) as fleet,
        ):
            await eventually(lambda: len(server.requests) > 4)
            assert fleet.replica.models is None
            assert not fleet.engine.status().ready

    async def test_a_kvshare_server_is_named_once_as_what_it_is(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """On both addresses, and for as long as it is that."""
        async with raw_server(reply(b"{}", headers="Server: kvshare\r\n")) as server:
            row = {"url": server.url, "control_url": server.url, "name": "a"}
            async with serving(None, row, wait=False) as fleet:
                await eventually(lambda: len(server.requests) > 8)
                assert not fleet.replica.serves
        assert len(lines(caplog, "replica a gets no requests: ")) == 1
        assert len(lines(caplog, "replica a shares nothing for now: ")) == 1

    async def test_a_vllm_is_asked_often_once_its_connector_is_there(
        self, vllm: FakeVllm, control: RealControl
    ) -> None:
        """However long is waited between questions: requests wait for it."""
        await vllm.stop()
        async with watching(vllm, control) as fleet:
            fleet.watcher._settings = fleet.watcher._settings.model_copy(update={"health_interval_s": 60.0})
            await eventually(lambda: fleet.replica.is_connected)
            await vllm.start()
            await eventually(lambda: fleet.replica.serves)
