"""Compressed bodies: what is taken is undone within bounds, everything else is the client's own error."""

from __future__ import annotations

import gzip
import json
import sys
import tracemalloc
import zlib
from collections.abc import Callable

import brotli
import pytest

from kvshare.errors import RequestError
from proxy.content_encoding import _decoded
from proxy.errors import HttpError
from tests.proxy.conftest import Server, chat, running_server

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

CHAT = "/v1/chat/completions"
BODY = json.dumps(chat("hello")).encode()
TAKEN = "gzip, deflate, br, zstd"


def deflate_bare(raw: bytes) -> bytes:
    """Without zlib's header, as some clients send it."""
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(raw) + packer.flush()


PACKERS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "deflate": ("deflate", zlib.compress),
    "bare": ("deflate", deflate_bare),
    "br": ("br", lambda raw: brotli.compress(raw, quality=1)),
    "zstd": ("zstd", zstd.compress),
}


@pytest.mark.parametrize(
    ("header", "raw"),
    [
        ("identity", BODY),
        ("", BODY),
        ("gzip", gzip.compress(BODY)),
        ("x-gzip", gzip.compress(BODY)),
        ("GZip", gzip.compress(BODY)),
        ("gzip, identity", gzip.compress(BODY)),
        ("gzip", gzip.compress(BODY[:9]) + gzip.compress(BODY[9:])),
        ("gzip, gzip", gzip.compress(gzip.compress(BODY))),
        ("gzip,x-gzip , GZIP", gzip.compress(gzip.compress(gzip.compress(BODY)))),
        ("deflate", zlib.compress(BODY)),
        ("deflate", deflate_bare(BODY)),
        ("br", brotli.compress(BODY)),
        ("zstd", zstd.compress(BODY)),
        ("zstd", zstd.compress(BODY[:9]) + zstd.compress(BODY[9:])),
        ("gzip, br", brotli.compress(gzip.compress(BODY))),
        ("zstd, deflate", zlib.compress(zstd.compress(BODY))),
    ],
)
async def test_what_is_taken(server: Server, header: str, raw: bytes) -> None:
    """Codings are undone, the last one first; `x-gzip` is gzip and `identity` is none."""
    response = await server.post(CHAT, raw, **{"Content-Encoding": header})
    assert response.status == 200, await response.text()


@pytest.mark.parametrize(
    ("header", "got"),
    [
        ("compress", "'compress'"),
        ("x-compress", "'x-compress'"),
        ("gzip, foo", "'foo'"),
        ("foo, gzip", "'foo'"),
        ("utf-8", "'utf-8'"),
        ("*", "'*'"),
        ("gzip;q=1", "'gzip;q=1'"),
        ("x" * 100, "'" + "x" * 40 + "'"),
        (", ".join(["gzip"] * 5), "5 codings"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
async def test_what_is_not_taken_is_415(server: Server, path: str, header: str, got: str) -> None:
    """The message and the header Accept-Encoding name what is."""
    response = await server.post(path, BODY, **{"Content-Encoding": header})
    assert response.status == 415
    assert response.headers["Accept-Encoding"] == TAKEN
    message = (await response.json())["error"]["message"]
    assert TAKEN in message
    assert f"got {got}." in message


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: BODY,
        lambda raw: raw[:-1],
        lambda raw: raw[: len(raw) // 2],
        lambda raw: raw[:1],
        lambda raw: raw + b"x",
        lambda raw: raw + b"\0\0\0\0",
        lambda raw: b"\xff" + raw,
    ],
    ids=["another", "last byte", "half", "first byte", "more", "zeros", "before"],
)
async def test_what_is_damaged_is_400(
    server: Server, packer: str, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """It is the client's fault: no 500, no traceback, and the message names the coding."""
    name, compress = PACKERS[packer]
    response = await server.post(CHAT, damage(compress(BODY)), **{"Content-Encoding": name})
    assert response.status == 400
    message = (await response.json())["error"]["message"]
    assert message.startswith(f"The body is not the {name} that its Content-Encoding says: ")
    assert "failed" not in caplog.text


async def test_a_wrong_checksum_is_400(server: Server) -> None:
    """What was packed is whole, and is not what was packed."""
    raw = bytearray(gzip.compress(BODY))
    raw[-8] ^= 1
    assert (await server.post(CHAT, bytes(raw), **{"Content-Encoding": "gzip"})).status == 400


@pytest.mark.parametrize("packer", PACKERS)
def test_a_bomb_is_not_unpacked_beyond_the_bound(packer: str) -> None:
    """Whatever is packed: the memory that it takes is that of the bound."""
    name, compress = PACKERS[packer]
    bomb, bound = compress(bytes(20_000_000)), 100_000
    tracemalloc.start()
    with pytest.raises(HttpError) as caught:
        _decoded(bomb, (name,), bound)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert caught.value.reply.status == 413
    assert peak < 40 * bound


def test_a_bomb_within_a_bomb_is_refused_at_the_first_step_that_is_too_large() -> None:
    """Each step has the bound, not only the last."""
    with pytest.raises(HttpError):
        _decoded(gzip.compress(gzip.compress(bytes(20_000_000))), ("gzip", "gzip"), 10_000)
    assert _decoded(gzip.compress(gzip.compress(b"{}")), ("gzip", "gzip"), 10_000) == b"{}"


@pytest.mark.parametrize("packer", ["gzip", "zstd"])
def test_a_stream_of_thousands_of_members_is_refused(packer: str) -> None:
    """Each would cost more than its bytes."""
    name, compress = PACKERS[packer]
    with pytest.raises(RequestError, match="more than 1024 members"):
        _decoded(compress(b"") * 2000, (name,), 1000)


@pytest.mark.parametrize("packer", PACKERS)
def test_exactly_the_bound_is_taken(packer: str) -> None:
    """One byte more is not."""
    name, compress = PACKERS[packer]
    assert len(_decoded(compress(bytes(5000)), (name,), 5000)) == 5000
    with pytest.raises(HttpError):
        _decoded(compress(bytes(5001)), (name,), 5000)


async def test_the_bound_of_a_body_holds_after_unpacking() -> None:
    """The setting is one for both sizes, and the message says which of them is too large."""
    async with running_server(server__max_body_bytes=2000) as server:
        raw = gzip.compress(json.dumps(chat("x" * 3000)).encode())
        response = await server.post(CHAT, raw, **{"Content-Encoding": "gzip"})
        assert response.status == 413
        message = (await response.json())["error"]["message"]
        assert "after decompression: expected at most 2000 bytes" in message
