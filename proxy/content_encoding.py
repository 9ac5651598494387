"""
Undoes the `Content-Encoding` of a request body, with a bound on what comes out of it.

aiohttp's own decoder is off (`FrontRunner`): it takes one coding only, lets unknown ones pass as if there
were none, and does not find out that a stream breaks off.
"""

from __future__ import annotations

import asyncio
import sys
import zlib
from collections.abc import Callable, Mapping
from typing import Protocol

import brotli
from multidict import CIMultiDictProxy

from kvshare.errors import ErrorCode, RequestError
from proxy.errors import HttpError, too_large

if sys.version_info >= (3, 14):
    from compression.zstd import DecompressionParameter, ZstdDecompressor, ZstdError
else:
    from backports.zstd import DecompressionParameter, ZstdDecompressor, ZstdError

TAKEN = "gzip, deflate, br, zstd"  # also what the header Accept-Encoding of a refusal says

_ALIASES = {"x-gzip": "gzip"}  # RFC 9110, 8.4.1.3
_MOST_CODINGS = 4  # one over the other
_MOST_MEMBERS = 1024  # of a gzip or zstd stream
_PIECE = 4096  # bytes that a decoder gets at a time: of what follows a member it makes a copy
_ZSTD_WINDOW_LOG = 23  # 8 MiB: what RFC 9659 lets a sender use in HTTP


class _Broken(Exception):
    """The bytes are not what the coding's name says. The message ends a sentence."""


class _TooLarge(Exception):
    """More comes out than may."""


class _Decoder(Protocol):
    """A decompressor of one member of a stream: zlib's, or zstd's of the standard library."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


def codings_of(headers: CIMultiDictProxy[str]) -> tuple[str, ...]:
    """
    The codings of a body, as they were applied.

    Raises:  HttpError 415, which names those that are taken
    """
    listed = ",".join(headers.getall("Content-Encoding", ()))
    names = [name.strip().lower() for name in listed.split(",")]
    codings = tuple(_ALIASES.get(name, name) for name in names if name not in ("", "identity"))
    unknown = next((name for name in codings if name not in _DECODERS), None)
    if unknown is None and len(codings) <= _MOST_CODINGS:
        return codings
    got = f"{len(codings)} codings" if unknown is None else f"'{unknown[:40]}'"
    message = (
        f"The body's Content-Encoding cannot be undone: expected identity or at most {_MOST_CODINGS} of "
        f"{TAKEN}, got {got}."
    )
    raise HttpError(415, ErrorCode.UNSUPPORTED_MEDIA_TYPE, message, {"Accept-Encoding": TAKEN})


async def decoded(raw: bytes, codings: tuple[str, ...], *, max_bytes: int) -> bytes:
    """
    The body without its codings, the last one first. No step makes more than `max_bytes`.

    Raises:  HttpError 413; RequestError for bytes that are not in that coding, break off or go on after it
    """
    return await asyncio.to_thread(_decoded, raw, codings, max_bytes) if codings and raw else raw


def _decoded(raw: bytes, codings: tuple[str, ...], max_bytes: int) -> bytes:
    for coding in reversed(codings):
        try:
            raw = _DECODERS[coding](raw, max_bytes)
        except _TooLarge:
            raise too_large(max_bytes, "after decompression") from None
        except (_Broken, zlib.error, ZstdError, brotli.error) as exc:
            problem = str(exc) if isinstance(exc, _Broken) else "it is damaged, or something else"
            raise RequestError(
                f"The body is not the {coding} that its Content-Encoding says: {problem}."
            ) from None
    return raw


def _members(raw: bytes, max_bytes: int, new_decoder: Callable[[], _Decoder], *, most: int) -> bytes:
    """Return the content of one or several members that follow each other."""
    decoder, num_members, out = new_decoder(), 1, bytearray()
    for start in range(0, len(raw), _PIECE):
        pending = raw[start : start + _PIECE]
        while pending:
            if decoder.eof:
                num_members += 1
                if num_members > most:
                    raise _Broken("bytes follow its end" if most == 1 else f"it has more than {most} members")
                decoder = new_decoder()
            out += decoder.decompress(pending, max_bytes + 1 - len(out))
            if len(out) > max_bytes:
                raise _TooLarge
            pending = decoder.unused_data if decoder.eof else b""  # all was read: its output had room
    if not decoder.eof:
        raise _Broken("it breaks off")
    return bytes(out)


def _gzip(raw: bytes, max_bytes: int) -> bytes:
    return _members(raw, max_bytes, lambda: zlib.decompressobj(16 + zlib.MAX_WBITS), most=_MOST_MEMBERS)


def _deflate(raw: bytes, max_bytes: int) -> bytes:
    """Decode `deflate` with zlib's header, as RFC 9110 says, or without, as some clients send it."""
    has_header = raw[0] & 0x0F == zlib.DEFLATED
    wbits = zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS
    return _members(raw, max_bytes, lambda: zlib.decompressobj(wbits), most=1)


def _zstd(raw: bytes, max_bytes: int) -> bytes:
    options: dict[int, int] = {DecompressionParameter.window_log_max: _ZSTD_WINDOW_LOG}
    return _members(raw, max_bytes, lambda: ZstdDecompressor(options=options), most=_MOST_MEMBERS)


def _brotli(raw: bytes, max_bytes: int) -> bytes:
    decoder, out = brotli.Decompressor(), bytearray()
    pending = raw
    while not decoder.is_finished():
        out += decoder.process(pending, output_buffer_limit=max_bytes + 1 - len(out))
        if len(out) > max_bytes:
            raise _TooLarge
        if decoder.can_accept_more_data() and not decoder.is_finished():
            raise _Broken("it breaks off")
        pending = b""
    return bytes(out)


_DECODERS: Mapping[str, Callable[[bytes, int], bytes]] = {
    "gzip": _gzip,
    "deflate": _deflate,
    "br": _brotli,
    "zstd": _zstd,
}
