"""The client of vLLM and of the control server: what it takes for an answer, and whom it gives a secret."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from delta_tree import SegmentId
from kvshare.errors import UpstreamError
from kvshare.fleet.client import ControlClient
from kvshare.vllm_protocol.json_fields import WireError
from kvshare.vllm_protocol.messages import PROTOCOL, FinishedReport
from kvshare_lab.vllm.session import watching
from tests.fake_vllm import Behaviour, FakeVllm, running_vllm


@pytest.fixture
async def vllm() -> AsyncIterator[FakeVllm]:
    async with running_vllm(Behaviour(token="secret")) as replica:
        yield replica


async def test_a_refused_call_says_with_which_status(vllm: FakeVllm) -> None:
    """`kvshare doctor` tells a wrong token from a server that is not there."""
    async with ControlClient(vllm.control_url, token="wrong") as control:
        with pytest.raises(UpstreamError) as error:
            await control.info()
    assert error.value.status == 401


async def test_an_answer_of_another_protocol_names_its_field(vllm: FakeVllm) -> None:
    """The cause is the error of the reader, and there is no status: the answer was a 200."""
    vllm.behaviour.protocol = 1
    async with ControlClient(vllm.control_url, token="secret") as control:
        with pytest.raises(UpstreamError, match=f"protocol: expected {PROTOCOL}, got 1") as error:
            await control.info()
    assert error.value.status is None
    assert isinstance(error.value.__cause__, WireError)


async def test_a_redirect_is_not_followed(vllm: FakeVllm) -> None:
    """The token goes to the host that was named, and nowhere else."""

    async def away(request: web.Request) -> web.Response:
        raise web.HTTPFound(vllm.control_url + request.path)

    app = web.Application()
    app.router.add_get("/info", away)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with ControlClient(f"http://127.0.0.1:{runner.addresses[0][1]}", token="secret") as control:
            with pytest.raises(UpstreamError) as error:
                await control.info()
    finally:
        await runner.cleanup()
    assert error.value.status == 302


async def test_a_benchmark_sees_what_happens_while_it_watches(vllm: FakeVllm) -> None:
    """What came before is not counted, what comes last is."""
    vllm._tell(FinishedReport("before", "full", None))
    vllm.segments[SegmentId(1)] = ("n", (1, 2))
    async with ControlClient(vllm.control_url, token="secret") as control, watching(control) as watch:
        vllm._tell(FinishedReport("r", "exact", "no_room"))
        vllm.evict(SegmentId(1))
    assert watch.decisions == {"exact": 1, "reason:no_room": 1}
    assert (watch.num_dropped, watch.max_bytes) == (1, 10**7)
