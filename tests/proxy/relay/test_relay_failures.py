"""Replicas and connectors that fail, break off or are refused: requests are served all the same."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.fake_vllm import MODEL, FakeVllm
from tests.proxy.conftest import eventually
from tests.proxy.relay.relay_server import Relay, chat_body, running_relay

CHAT = "/v1/chat/completions"


def waiting(relay: Relay) -> int:
    """Prompts that a paused index misses."""
    index = relay.engine.status().index
    assert index is not None
    return index.num_waiting


async def test_who_has_no_key_is_told_no_address(tmp_path: Path) -> None:
    """Of replicas without a name: their numbers, by data-parallel rank. Those with one have that."""
    rows: list[dict[str, Any]] = [{"url": f"http://127.0.0.1:{port}"} for port in (1, 2, 3)]
    rows[1] |= {"data_parallel_size": 2}
    rows[2] |= {"name": "gpu-3"}
    async with running_relay(tmp_path, *rows, wait=False) as relay:
        parts = (await (await relay.send("/status", method="GET")).json())["parts"]
        ready = await (await relay.send("/ready", method="GET")).text()
        told = (await (await relay.send("/admin/status", method="GET")).json())["parts"]
    assert [each["name"] for each in parts if each["part"] == "replica"] == ["1", "2-dp0", "2-dp1", "gpu-3"]
    assert "replica 1: it does not answer" in ready
    assert "127.0.0.1" not in ready
    assert "127.0.0.1:1" in [each.get("name") for each in told]


async def test_nobody_there_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The proxy starts all the same, is not ready, says so, and serves when vLLM is up."""
    vllm = FakeVllm()
    await vllm.start()
    await vllm.stop()
    async with running_relay(tmp_path, vllm, wait=False) as relay:
        assert "not ready" in caplog.text
        assert (await relay.send("/ready", method="GET")).status == 503
        response = await relay.send(CHAT, chat_body("Rome"))
        assert (response.status, response.headers["Retry-After"]) == (503, "1")
        assert (await response.json())["error"]["code"] == "no_replica"
        told = [record for record in caplog.records if "shares nothing for now" in record.message]
        assert len(told) == 1
        await vllm.start()
        try:
            await eventually(lambda: bool(relay.engine.fleet.sharing()))
            assert (await relay.chat("Rome")).status == 200
        finally:
            await vllm.stop()


async def test_vllm_without_a_connector_is_served_unshared(vllm: FakeVllm, tmp_path: Path) -> None:
    """Nothing listens where the connector should be; requests go through, under their owner's salt."""
    nowhere = {"url": vllm.url, "control_url": "http://127.0.0.1:9"}
    async with running_relay(tmp_path, nowhere, wait=False) as relay:
        assert (await relay.send("/ready", method="GET")).status == 200
        assert (await relay.send(CHAT, chat_body("Rome"))).status == 200
        assert vllm.generated[0].ticket is None
        assert "cache_salt" in vllm.generated[0].body


async def test_a_proxy_in_front_of_a_proxy_says_so(
    vllm: FakeVllm, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It sends no requests there, which could go round; nothing it asks is a 404 in the other's log."""
    async with running_relay(tmp_path / "a", vllm) as first:
        there = {"url": first.url, "control_url": first.url}
        async with running_relay(tmp_path / "b", there, wait=False) as second:
            assert (await second.send(CHAT, chat_body("Rome"))).status == 503
            await eventually(lambda: caplog.text.count("a KVShare server answers") >= 2)
            await asyncio.sleep(0.5)
    told = [record.getMessage() for record in caplog.records if "KVShare server" in record.getMessage()]
    assert len(told) == 2
    assert any("gets no requests" in line and "url must be that of a vLLM" in line for line in told)
    assert any("shares nothing for now" in line and "control_url must be" in line for line in told)
    assert not [record for record in caplog.records if " 404" in record.getMessage()]


async def test_an_answer_that_breaks_off_says_so(relay: Relay, vllm: FakeVllm) -> None:
    """The client gets an error and an end, not an answer that looks complete."""
    vllm.behaviour.die_after_chunks = 3
    response = await relay.send(CHAT, chat_body("Rome", stream=True))
    raw = await response.read()
    assert raw.startswith(vllm.sent)
    assert raw.endswith(b"data: [DONE]\n\n")
    assert b'"code":"engine_error"' in raw
    async with relay.client() as client:
        stream = await client.chat.completions.create(**chat_body("Rome"), stream=True)
        with pytest.raises(openai.APIError):
            async for _ in stream:
                pass


async def test_a_client_that_goes_away_frees_vllm(relay: Relay, vllm: FakeVllm) -> None:
    """The connection to vLLM is closed at once, and vLLM aborts."""
    body = chat_body("Rome", stream=True, slow=True)
    async with relay.http.post(relay.url + CHAT, json=body) as response:
        await response.content.readany()
        response.close()
    await asyncio.wait_for(vllm.closed_early.wait(), 60)
    await eventually(lambda: relay.engine.status().num_running == 0)


async def test_a_client_that_goes_away_before_the_answer_frees_vllm(relay: Relay, vllm: FakeVllm) -> None:
    """Also where there is not one byte yet."""
    vllm.release.clear()
    asking = asyncio.create_task(relay.send(CHAT, chat_body("Rome")))
    await asyncio.wait_for(vllm.running.wait(), 60)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await eventually(lambda: relay.engine.status().num_running == 0)
    vllm.release.set()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_drain_ends_what_runs(relay: Relay, vllm: FakeVllm, stream: bool) -> None:
    """With the error of a server that shuts down, in the stream or instead of the answer."""
    vllm.behaviour.token_s = 5.0
    if not stream:
        vllm.release.clear()
    asking = asyncio.create_task(relay.send(CHAT, chat_body("Rome", stream=stream)))
    await asyncio.wait_for(vllm.running.wait(), 60)
    await asyncio.sleep(0.1)
    await relay.lifecycle.drain(0.05)
    response = await asyncio.wait_for(asking, 60)
    assert b'"code": "shutting_down"' in (raw := await response.read()) or b'"code":"shutting_down"' in raw
    assert response.status == (200 if stream else 503)
    vllm.release.set()


async def test_a_replica_that_says_nothing_is_given_up(vllm: FakeVllm, tmp_path: Path) -> None:
    """An error with a status of its own, and the connection to vLLM is closed."""
    async with running_relay(tmp_path, vllm, vllm__read_timeout_s=0.2) as relay:
        vllm.release.clear()
        response = await relay.send(CHAT, chat_body("Rome"))
        assert (response.status, (await response.json())["error"]["code"]) == (504, "upstream_timeout")
        assert relay.engine.status().num_running == 0
        vllm.release.set()


async def test_an_outage_does_not_fill_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Requests that find nobody are a state that was told, not failures with a traceback each."""
    vllm = FakeVllm()
    await vllm.start()
    await vllm.stop()
    async with running_relay(tmp_path, vllm, wait=False) as relay:
        for _ in range(3):
            assert (await relay.send(CHAT, chat_body("Rome"))).status == 503
    assert "Traceback" not in caplog.text
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@asynccontextmanager
async def quoting_replica() -> AsyncIterator[dict[str, str]]:
    """A replica that lists its model, and answers anything else with a broken status line that quotes it."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = re.search(r"Content-Length: (\d+)", head)
        body = await reader.readexactly(int(length[1])) if length else b""
        models = json.dumps({"data": [{"id": MODEL, "max_model_len": 1000}]})
        ok = f"HTTP/1.1 200 OK\r\nContent-Length: {len(models)}\r\nConnection: close\r\n\r\n{models}".encode()
        writer.write(body + b"\r\n\r\n" if body else ok)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield {"url": url, "control_url": url}


async def test_a_replica_that_quotes_the_prompt_does_not_get_it_into_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Errors of the HTTP client quote what a server sent; the log has their class and place only."""
    caplog.set_level(logging.DEBUG, logger="proxy")
    async with quoting_replica() as replica, running_relay(tmp_path, replica, wait=False) as relay:
        response = await relay.send(CHAT, chat_body("TOPSECRET"))
    assert response.status == 503
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("proxy")]
    assert "SECRET" not in "".join(lines)
    assert any("did not take a request: UpstreamError at client.py:" in line for line in lines)


async def test_a_paused_index_shows_in_ready_and_metrics(vllm: FakeVllm, tmp_path: Path) -> None:
    """A disk with too little room costs no request; what is kept waits for the index."""
    floor: dict[str, Any] = {"index__backend": "edge", "store__min_free_bytes": 2**60}
    async with running_relay(tmp_path, vllm, **floor) as relay:
        await relay.chat("Rome")
        await relay.chat("Oslo")
        await eventually(lambda: relay.num_nodes == 2)
        await eventually(lambda: waiting(relay) == 2)
        async with relay.http.get(f"{relay.url}/ready") as response:
            assert response.status == 200
            assert "the index is paused" in (await response.json())["detail"]
        async with relay.http.get(f"{relay.url}/metrics") as response:
            metrics = await response.text()
    assert "kvshare_index_paused 1.0" in metrics
    assert "kvshare_index_waiting_prompts 2.0" in metrics


async def test_a_refusal_of_vllm_is_logged_by_its_kind(
    relay: Relay, vllm: FakeVllm, caplog: pytest.LogCaptureFixture
) -> None:
    """The client gets vLLM's answer as it is; the log has no word of it, as it may quote the prompt."""
    caplog.set_level(logging.INFO, logger="proxy.middleware")
    vllm.behaviour.status = 400
    response = await relay.send(CHAT, chat_body("Rome"))
    assert response.status == 400
    (line,) = [record.getMessage() for record in caplog.records if record.name == "proxy.middleware"]
    assert "error=" in line
    assert "vLLM's own answer" in line
