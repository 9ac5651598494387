"""Bare sockets: half-closed connections, and clients that wait for `100 Continue`."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import pytest

from proxy import connection
from tests.fake_vllm import running_vllm
from tests.proxy.conftest import Server, chat, eventually, running_server
from tests.proxy.fake_engine import Behaviour
from tests.proxy.relay.relay_server import chat_body, running_relay
from tests.proxy.sockets import CHAT, HEAD, all_of, connect


def asking(body: object, *headers: str, path: str = CHAT, version: str = "1.1") -> bytes:
    """The bytes of a POST."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"Content-Length: {len(raw)}", *headers]
    return (HEAD.format(path=path, version=version) + "\r\n".join(lines) + "\r\n\r\n").encode() + raw


async def half_closed(url: str, raw: bytes) -> bytes:
    """All that comes back to a client that closes its sending side at once."""
    reader, writer = await connect(url)
    writer.write(raw)
    writer.write_eof()
    answer = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    return answer


def reset(writer: asyncio.StreamWriter) -> None:
    """End the connection as a process does that is killed with bytes unread."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    writer.transport.abort()


SLOW = {
    "at once": Behaviour(),
    "after the plan": Behaviour(plan_s=0.2),
    "after the prefill": Behaviour(prefill_s=0.2),
    "token by token": Behaviour(token_s=0.05),
}


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("behaviour", SLOW)
async def test_a_half_closed_connection_gets_its_answer(behaviour: str, version: str) -> None:
    """Whole and streamed; then the server closes, too."""
    async with running_server(SLOW[behaviour]) as server:
        whole = await half_closed(server.url, asking(chat("hello"), version=version))
        stream = await half_closed(server.url, asking(chat("hello", stream=True), version=version))
    assert whole.startswith(f"HTTP/{version} 200 OK".encode())
    assert b'"hello"' in whole
    assert b"data: [DONE]" in stream
    assert stream.count(b'"finish_reason":"stop"') == 1


async def test_all_requests_before_the_end_get_their_answers(server: Server) -> None:
    """Also those that were sent one behind the other."""
    answer = await half_closed(server.url, asking(chat("one")) + asking(chat("two")))
    assert (answer.count(b"HTTP/1.1 200 OK"), b'"one"' in answer, b'"two"' in answer) == (2, True, True)


@pytest.mark.parametrize(
    "raw",
    [b"", b"POST /v1/chat", HEAD.format(path=CHAT, version="1.1").encode()],
    ids=["nothing", "line", "head"],
)
async def test_half_a_request_gets_none(server: Server, raw: bytes) -> None:
    """The server closes, as there is nothing to answer."""
    assert await half_closed(server.url, raw) == b""


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
@pytest.mark.parametrize("num_missing", [1, 20])
async def test_half_a_body_is_400(server: Server, path: str, num_missing: int) -> None:
    """In the words of the route's API."""
    answer = await half_closed(server.url, asking(chat("hello"), path=path)[:-num_missing])
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"did not arrive whole: the client closed the connection's sending side" in answer


async def test_a_slow_answer_to_a_half_closed_connection_is_preceded_by_100() -> None:
    """It finds out whether the client is there, and clients discard it."""
    async with running_server(Behaviour(plan_s=0.8)) as server:
        answer = await half_closed(server.url, asking(chat("hello")))
        assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")
        old = await half_closed(server.url, asking(chat("hello"), version="1.0"))
        assert old.startswith(b"HTTP/1.0 200 OK\r\n")  # HTTP/1.0 has no 100


@pytest.mark.parametrize("how", ["close", "reset", "half-close, then close", "half-close, then reset"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "behaviour", [Behaviour(plan_s=30), Behaviour(prefill_s=30)], ids=["planning", "prefilling"]
)
async def test_a_client_that_is_gone_frees_its_slot(
    behaviour: Behaviour, stream: bool, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However it goes, before the first byte and within a silent stream."""
    monkeypatch.setattr(connection, "_WATCH_S", 0.01)
    async with running_server(behaviour) as server:
        _, writer = await connect(server.url)
        writer.write(asking(chat("hello", stream=stream)))
        await asyncio.wait_for(server.engine.running.wait(), 20)
        if how.startswith("half-close"):
            writer.write_eof()
            await asyncio.sleep(0.1)
            assert server.engine.num_running == 1
        if how.endswith("reset"):
            reset(writer)
        else:
            writer.close()
        await asyncio.wait_for(server.engine.freed.wait(), 20)
        await eventually(lambda: server.lifecycle.num_running == 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_half_closed_before_vllm(tmp_path: Path, stream: bool) -> None:
    """The relay passes the answer on; and lets go of vLLM when the client is gone."""
    async with running_vllm() as vllm, running_relay(tmp_path, vllm) as relay:
        answer = await half_closed(relay.url, asking(chat_body("Rome", stream=stream)))
        assert answer.startswith(b"HTTP/1.1 200 OK")
        assert (b"data: [DONE]" if stream else b'"choices"') in answer


async def test_a_silent_relayed_stream_is_probed_between_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A comment that readers skip shows that the client has gone; vLLM is let go of."""
    monkeypatch.setattr(connection, "_WATCH_S", 0.01)
    async with running_vllm() as vllm, running_relay(tmp_path, vllm) as relay:
        reader, writer = await connect(relay.url)
        writer.write(asking(chat_body("Rome", stream=True, slow=True)))
        await reader.readuntil(b"data: ")
        writer.write_eof()
        assert b": keep-alive\n\n" in await asyncio.wait_for(reader.readuntil(b": keep-alive\n\n"), 20)
        writer.close()
        await asyncio.wait_for(vllm.closed_early.wait(), 20)


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/embeddings", "/nothing"])
@pytest.mark.parametrize("expectation", ["other", "100-continue, other", "200-ok"])
async def test_another_expectation_is_417_in_the_words_of_the_api(
    server: Server, path: str, expectation: str
) -> None:
    """JSON as every error, and a line in the log."""
    headers = (f"Expect: {expectation}", "Connection: close")
    status, body = await all_of(server.url, asking(b"{}", *headers, path=path))
    assert status == 417
    assert ("type" in json.loads(body)) == (path == "/v1/messages")
    assert f"expected 100-continue, got '{expectation}'" in json.loads(body)["error"]["message"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ("Content-Length: 50000000", 413),
        ("Content-Length: 100\r\nContent-Encoding: foo", 415),
        ("Content-Length: 100\r\nContent-Type: text/plain", 415),
        ("Content-Length: 100\r\nAuthorization: Bearer x", 401),
    ],
)
async def test_what_is_refused_by_its_headers_is_not_asked_for(
    guarded: Server, headers: str, status: int
) -> None:
    """The client waits for 100 with its body, and reads the refusal instead."""
    head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\n{headers}\r\n"
    head += "" if "Content-Type" in headers else "Content-Type: application/json\r\n"
    head += "" if "Authorization" in headers else "Authorization: Bearer sk-alice\r\n"
    reader, writer = await connect(guarded.url)
    writer.write(f"{head}\r\n".encode())
    assert (await asyncio.wait_for(reader.readline(), 20)).startswith(f"HTTP/1.1 {status} ".encode())
    writer.close()


async def test_a_body_that_is_taken_is_asked_for(server: Server) -> None:
    """100 comes when all else is in order; then the answer."""
    raw = asking(chat("hello"), "expect: 100-Continue")
    head, _, body = raw.partition(b"\r\n\r\n")
    reader, writer = await connect(server.url)
    writer.write(head + b"\r\n\r\n")
    assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20) == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body)
    assert (await asyncio.wait_for(reader.readline(), 20)).startswith(b"HTTP/1.1 200 ")
    writer.close()
