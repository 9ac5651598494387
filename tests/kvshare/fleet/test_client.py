"""The client of the control server, the connector's own one: what is an answer, and who gets a secret."""

from __future__ import annotations

import asyncio
import json

import pytest

from delta_tree import SegmentId
from kvshare.errors import UpstreamError, WrongServerError
from kvshare.fleet.client import ControlClient
from kvshare.vllm_protocol.json_fields import WireError
from kvshare.vllm_protocol.messages import PROTOCOL, Dropped, FinishedReport, JournalEvent
from kvshare.vllm_protocol.places import DiskProblem, Moved
from tests.kvshare.fleet.http_servers import raw_server, reply, unused_port
from tests.kvshare.fleet.real_control import info_of, running_control

INFO = json.dumps(info_of().to_json()).encode()
MISSING = reply(b"{}", status="404 Not Found")


async def test_what_a_connector_says_is_read_as_it_was_said() -> None:
    """Its info, its journal from any event on, what it holds, and what it is to drop."""
    events: list[JournalEvent] = [
        FinishedReport("r", "full", None),
        Dropped((SegmentId(3),)),
        Moved((SegmentId(1),)),
    ]
    async with running_control(warnings=("slow",)) as server, ControlClient(server.url) as control:
        server.hold(1, 2, 3)
        for event in events:
            server.tell(event)
        assert await control.info() == server.info()
        whole = await control.journal(after=0, wait_s=0)
        assert (whole.epoch, whole.last, whole.gap) == (server.events.epoch, 3, False)
        assert whole.events == tuple(events)
        assert (await control.journal(after=2, wait_s=0)).events == tuple(events[2:])
        assert (await control.journal(after=3, wait_s=0)).events == ()
        assert (await control.journal(after=4, wait_s=0)).gap
        held = await control.segments()
        assert (held.epoch, held.last, held.segment_ids, held.on_disk) == (
            server.events.epoch,
            3,
            (1, 2, 3),
            (),
        )
        await control.drop([SegmentId(1), SegmentId(7)], stays_shared=True)
        assert server.dropped == [1]
        assert (await control.segments()).segment_ids == (2, 3)


async def test_it_waits_for_the_first_event() -> None:
    """And not for longer than the connector lets it, whatever its own timeout is."""
    async with running_control() as server, ControlClient(server.url, timeout_s=60.0) as control:
        asked = asyncio.create_task(control.journal(after=0, wait_s=20.0))
        await asyncio.sleep(0.02)
        assert not asked.done()
        server.tell(DiskProblem("full"))
        assert (await asked).events == (DiskProblem("full"),)


@pytest.mark.parametrize("token", [None, "wrong"])
async def test_a_refused_call_says_with_which_status(
    monkeypatch: pytest.MonkeyPatch, token: str | None
) -> None:
    """`kvshare doctor` tells a wrong token from a server that is not there."""
    monkeypatch.delenv("KVSHARE_VLLM_TOKEN", raising=False)
    async with (
        running_control(token="secret") as server,
        ControlClient(server.url, token=token) as control,
    ):
        with pytest.raises(UpstreamError, match="expected status 200, got 401") as error:
            await control.info()
    assert error.value.status == 401


async def test_its_key_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless another one is given."""
    monkeypatch.setenv("KVSHARE_VLLM_TOKEN", "wrong")
    async with running_control(token="secret") as server:
        async with ControlClient(server.url, token="secret") as control:
            assert await control.info() == server.info()
        monkeypatch.setenv("KVSHARE_VLLM_TOKEN", "secret")
        async with ControlClient(server.url) as control:
            assert await control.info() == server.info()


async def test_an_answer_of_another_protocol_names_its_field() -> None:
    """The cause is the error of the reader, and there is no status: the answer was a 200."""
    old = reply(json.dumps({**json.loads(INFO), "protocol": PROTOCOL - 1}).encode())
    async with raw_server(MISSING, old) as server, ControlClient(server.url) as control:
        with pytest.raises(
            UpstreamError, match=f"protocol: expected {PROTOCOL}, got {PROTOCOL - 1}"
        ) as error:
            await control.info()
    assert error.value.status is None
    assert isinstance(error.value.__cause__, WireError)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (reply(INFO[:40], length=len(INFO)), "Response payload is not completed"),
        (reply(INFO[:40]), "the answer is not JSON"),
        (reply(b""), "the answer is not JSON"),
        (reply(b"[]"), "Input should be a dictionary"),
        (reply(b"{}"), "expected"),
        (reply(b"\xff\xfe"), "the answer is not JSON"),
        (b"HTTP/1.1 2", "."),
        (b"no HTTP at all\r\n\r\n", "."),
        (None, "Server disconnected"),
    ],
    ids=[
        "half",
        "cut",
        "empty",
        "a list",
        "no fields",
        "no text",
        "half a line",
        "another protocol",
        "closed",
    ],
)
async def test_half_an_answer_is_none(answer: bytes | None, problem: str) -> None:
    """One error, with the address and without the query; never what was read so far."""
    async with raw_server(MISSING, answer) as server, ControlClient(server.url, proxy="me") as control:
        with pytest.raises(UpstreamError, match=problem) as error:
            await control.info()
        with pytest.raises(UpstreamError) as again:
            await control.journal(after=7, wait_s=0)
    assert str(error.value).startswith(f"{server.url}/info: ")
    assert str(again.value).startswith(f"{server.url}/journal: ")
    assert error.value.status is None


async def test_what_says_nothing_is_given_up() -> None:
    """After the timeout, to which a journal adds what it waits for."""
    async with raw_server(b"") as server, ControlClient(server.url, timeout_s=0.05) as control:
        with pytest.raises(UpstreamError, match="/segments: no answer in time"):
            await control.segments()
        with pytest.raises(UpstreamError, match="/journal: no answer in time"):
            await control.journal(after=0, wait_s=0.1)


async def test_where_nothing_listens_the_address_is_said() -> None:
    url = f"http://127.0.0.1:{await unused_port()}"
    async with ControlClient(url, timeout_s=60.0) as control:
        with pytest.raises(UpstreamError, match=f"^{url}/health: ") as error:
            await control.info()  # asks for no more
    assert error.value.status is None


async def test_a_kvshare_server_is_asked_for_nothing_that_it_would_log() -> None:
    """What is expected there is said with the option that sets it."""
    answer = reply(b"{}", headers="Server: kvshare\r\n")
    async with raw_server(answer) as server, ControlClient(server.url) as control:
        with pytest.raises(WrongServerError, match=r"control_url must be .* --vllm-control-url"):
            await control.info()
    (request,) = server.requests
    assert request.startswith(b"GET /health ")


async def test_a_redirect_is_not_followed() -> None:
    """The token goes to the host that was named, and nowhere else."""
    async with raw_server(reply(b"{}")) as elsewhere:
        away = reply(b"", status="302 Found", headers=f"Location: {elsewhere.url}/info\r\n")
        async with raw_server(away) as server, ControlClient(server.url, token="secret") as control:
            with pytest.raises(UpstreamError) as error:
                await control.info()
    assert error.value.status == 302
    assert b"Authorization: Bearer secret" in server.requests[0]
    assert elsewhere.requests == []


async def test_a_reader_that_stores_names_itself() -> None:
    """By it a connector sees that two proxies use it; `stays_shared` is sent only where it is meant."""
    journal = reply(b"{}")
    async with raw_server(journal) as server, ControlClient(server.url, proxy="p1") as control:
        with pytest.raises(UpstreamError):
            await control.journal(after=5, wait_s=1.5)
        await control.drop([SegmentId(1)])
        await control.drop([SegmentId(2)], stays_shared=True)
    assert b"GET /journal?after=5&wait_s=1.5&proxy=p1 " in server.requests[0]
    bodies = [json.loads(request.partition(b"\r\n\r\n")[2]) for request in server.requests[1:]]
    assert bodies == [{"segment_ids": [1]}, {"segment_ids": [2], "stays_shared": True}]
