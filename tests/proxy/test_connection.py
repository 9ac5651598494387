"""Bare sockets: half-closed connections, clients that wait for `100 Continue`, requests that are none."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from pathlib import Path

import pytest
import yaml
from yarl import URL

from proxy import connection
from tests.fake_vllm import running_vllm
from tests.proxy.conftest import Server, chat, eventually, running_server
from tests.proxy.fake_engine import Behaviour
from tests.proxy.relay.relay_server import chat_body, running_relay

CHAT = "/v1/chat/completions"
HEAD = "POST {path} HTTP/{version}\r\nHost: a\r\nContent-Type: application/json\r\n"


def asking(body: object, *headers: str, path: str = CHAT, version: str = "1.1") -> bytes:
    """The bytes of a POST."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"Content-Length: {len(raw)}", *headers]
    return (HEAD.format(path=path, version=version) + "\r\n".join(lines) + "\r\n\r\n").encode() + raw


async def connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", URL(url).port)


async def half_closed(url: str, raw: bytes) -> bytes:
    """All that comes back to a client that closes its sending side at once."""
    reader, writer = await connect(url)
    writer.write(raw)
    writer.write_eof()
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return answer


async def all_of(url: str, raw: bytes) -> tuple[int, str]:
    """Status and body of an answer behind which the connection is closed."""
    reader, writer = await connect(url)
    writer.write(raw)
    head, _, body = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), body.decode()


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
        await asyncio.wait_for(server.engine.running.wait(), 5)
        if how.startswith("half-close"):
            writer.write_eof()
            await asyncio.sleep(0.1)
            assert server.engine.num_running == 1
        if how.endswith("reset"):
            reset(writer)
        else:
            writer.close()
        await asyncio.wait_for(server.engine.freed.wait(), 5)
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
        assert b": keep-alive\n\n" in await asyncio.wait_for(reader.readuntil(b": keep-alive\n\n"), 5)
        writer.close()
        await asyncio.wait_for(vllm.closed_early.wait(), 5)


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
    assert (await asyncio.wait_for(reader.readline(), 5)).startswith(f"HTTP/1.1 {status} ".encode())
    writer.close()


async def test_a_body_that_is_taken_is_asked_for(server: Server) -> None:
    """100 comes when all else is in order; then the answer."""
    raw = asking(chat("hello"), "expect: 100-Continue")
    head, _, body = raw.partition(b"\r\n\r\n")
    reader, writer = await connect(server.url)
    writer.write(head + b"\r\n\r\n")
    assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5) == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body)
    assert (await asyncio.wait_for(reader.readline(), 5)).startswith(b"HTTP/1.1 200 ")
    writer.close()


FAULTS = {
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "it is TLS"),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "it is HTTP/2"),
    "bytes": (b"\0\1\2\r\n\r\n", 400, "does not begin with a method"),
    "method": (b"get / HTTP/1.1\r\nHost: a\r\n\r\n", 400, "in capital letters"),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400, "no Host header"),
    "two hosts": (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400, "two Host headers"),
    "two lengths": (
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        400,
        "two Content-Length headers",
    ),
    "length and chunks": (
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
        400,
        "both Content-Length and Transfer-Encoding",
    ),
    "length": (
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
        400,
        "Content-Length is not a number",
    ),
    "huge length": (
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        400,
        "Content-Length is above 2^64",
    ),
    "coding": (
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n",
        400,
        "Transfer-Encoding is not chunked",
    ),
    "two types": (
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Type: a/b\r\nContent-Type: c/d\r\n\r\n",
        400,
        "two Content-Type headers",
    ),
    "version": (b"GET / HTTP/3.0\r\nHost: a\r\n\r\n", 400, "its version is not HTTP/1.0 or HTTP/1.1"),
    "no version": (b"GET /a b HTTP/1.1\r\nHost: a\r\n\r\n", 400, "its address has a space"),
    "path": (b"GET v1 HTTP/1.1\r\nHost: a\r\n\r\n", 400, "does not begin with a slash"),
    "word": (b"GET health HTTP/1.1\r\nHost: a\r\n\r\n", 400, "does not begin with a slash"),
    "huge chunk": (
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + b"f" * 18 + b"\r\nSECRET",
        400,
        "the size of a chunk of its body is above 2^64",
    ),
    "letter": ("GET /ä HTTP/1.1\r\nHost: a\r\n\r\n".encode(), 400, "with a percent sign"),
    "name": (
        b"GET / HTTP/1.1\r\nHost: a\r\nX y: SECRET\r\n\r\n",
        400,
        "the name of a header has a character",
    ),
    "value": (
        b"GET / HTTP/1.1\r\nHost: a\r\nX: SEC\0RET\r\n\r\n",
        400,
        "the value of a header has a character",
    ),
    "folded": (b"GET / HTTP/1.1\r\nHost: a\r\nX: SECRET\r\n b\r\n\r\n", 400, "goes on in the next line"),
    "lines": (b"GET / HTTP/1.1\nHost: a\n\n", 400, "does not end with CR LF"),
    "long header": (
        b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 9000 + b"\r\n\r\n",
        431,
        "A header of the request",
    ),
    "long name": (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"x" * 9000 + b": a\r\n\r\n", 431, "at most 8190 bytes"),
    "long line": (
        b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        414,
        "The request's line is too long",
    ),
    "many headers": (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: a\r\n" * 130 + b"\r\n", 431, "at most 128"),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_what_is_no_request_is_told_which_fault_it_has(
    server: Server, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As an error object, and in the log; both without the bytes."""
    caplog.set_level(logging.INFO, logger="proxy.middleware")
    raw, expected, words = FAULTS[name]
    status, body = await all_of(server.url, raw)
    error = json.loads(body)["error"]
    assert status == expected
    assert words in error["message"]
    assert (error["type"], error["param"]) == ("invalid_request_error", None)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "proxy.middleware"]
    assert error["message"] in line
    assert "SECRET" not in body + caplog.text


def test_each_of_the_parsers_reasons_has_one_fault() -> None:
    """The table has no reason twice."""
    table = yaml.safe_load(Path(connection.__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    reasons = [reason for each in table.values() for reason in each]
    assert sorted(reasons) == sorted(set(reasons)) == sorted(connection._FAULTS)


@pytest.mark.parametrize(
    ("chunk", "words"),
    [
        (b"zz\r\n{}\r\n", "does not begin with its size in hexadecimal digits"),
        (b"2\r\n{}XX\r\n", "is longer than its size says"),
        (b"99999999999999999999\r\n", "the size of a chunk of its body is above 2^64"),
    ],
)
async def test_a_body_whose_chunks_are_broken_is_400(server: Server, chunk: bytes, words: str) -> None:
    """At once, while its handler waits for the rest: not after the minute that a body may take."""
    head = HEAD.format(path="/v1/messages", version="1.1") + "Transfer-Encoding: chunked\r\n\r\n2\r\n{ \r\n"
    reader, writer = await connect(server.url)
    writer.write(head.encode())
    await asyncio.sleep(0.05)
    writer.write(chunk)
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert words.encode() in answer
    assert b'"type": "error"' in answer


@pytest.mark.parametrize(
    ("header", "found"),
    [
        ("", "the header is missing"),
        ("Content-Type:\r\n", "the header is missing"),
        ("Content-Type: json\r\n", "not 'json'"),
        ("Content-Type: text/json; charset=utf-8\r\n", "not 'text/json'"),
        ("Content-Type: application/octet-stream\r\n", "not 'application/octet-stream'"),
    ],
)
async def test_the_content_type_that_came_is_named(server: Server, header: str, found: str) -> None:
    """Not what aiohttp makes of a header that is missing or is none."""
    raw = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\n{header}Content-Length: 2\r\nConnection: close\r\n\r\n{{}}"
    status, body = await all_of(server.url, raw.encode())
    assert status == 415
    assert found in json.loads(body)["error"]["message"]


ODD = (b"\xff\xfe", "ä漢".encode(), b"[::", b"a\tb", b"", b"'\"<>", b"%00%ff", b"Bearer \xff", b"x" * 8000)
HEADERS = ("Authorization", "x-api-key", "Origin", "Host", "Content-Type", "Cache-Control", "Cookie", "Range")


@pytest.mark.parametrize("name", HEADERS)
async def test_no_value_of_a_header_is_the_servers_fault(server: Server, name: str) -> None:
    """Bytes that are no text, no host, no type: an answer below 500."""
    given = {"Host": b"127.0.0.1", "Content-Type": b"application/json", "Connection": b"close"}
    for value in ODD:
        pairs = (given | {name: value}).items()
        lines = b"".join(b"%b: %b\r\n" % (key.encode(), each) for key, each in pairs)
        for line in (f"POST {CHAT}", "GET /v1/models", "GET /metrics", "GET /admin/stats"):
            body = json.dumps(chat("a")).encode() if line.startswith("POST") else b""
            head = b"%b HTTP/1.1\r\n%bContent-Length: %d\r\n\r\n" % (line.encode(), lines, len(body))
            status, _ = await all_of(server.url, head + body)
            assert status < 500, (line, value)
            assert (name, line, status) != ("Host", "GET /admin/stats", 200), value
