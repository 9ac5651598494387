"""Bytes that are not an HTTP request, and headers that are odd: what a client is told."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from proxy import malformed_requests
from tests.proxy.conftest import Server, chat
from tests.proxy.sockets import CHAT, HEAD, all_of, connect

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
    reasons = [reason for each in malformed_requests._REASONS.values() for reason in each]
    assert sorted(reasons) == sorted(malformed_requests._FAULTS)


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
