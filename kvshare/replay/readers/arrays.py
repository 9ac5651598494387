"""
The elements of one large JSON array, one at a time: ShareGPT is published as such a file.

Finds where elements end and leaves parsing them to the caller, so that a broken element costs only itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Protocol

from kvshare.replay.readers.rows import Reason

_CHUNK_BYTES = 1 << 20
_OUTSIDE = re.compile(rb'["{}\[\],]')
_INSIDE = re.compile(rb'["\\]')  # a string


class ByteStream(Protocol):
    """What is read from."""

    def read(self, size: int, /) -> bytes:
        """At most that many bytes; none at the end."""


def array_elements(stream: ByteStream, *, max_bytes: int) -> Iterator[tuple[int, bytes | Reason]]:
    """
    (number from 1, its bytes), or a reason in place of the bytes.

    An element of more than `max_bytes` is TOO_LONG; an array without an end is TRUNCATED there.
    """
    scanner = _Scanner(max_bytes)
    number = 0
    while chunk := stream.read(_CHUNK_BYTES):
        for element in scanner.feed(chunk):
            number += 1
            yield number, element
        if scanner.at_end:
            return
    yield number + 1, Reason.TRUNCATED


class _Scanner:
    """Where we are: how deep, in a string or not, and the element read so far."""

    def __init__(self, max_bytes: int) -> None:
        self.at_end = False
        self._max_bytes = max_bytes
        self._depth = 0
        self._in_string = False
        self._too_long = False
        self._any = False  # element, so far
        self._buffer = bytearray()
        self._position = 0  # of the next byte to look at; may lie past the buffer, after a backslash

    def feed(self, chunk: bytes) -> Iterator[bytes | Reason]:
        """The elements that end in this chunk."""
        self._buffer += chunk
        while not self.at_end:
            match = (_INSIDE if self._in_string else _OUTSIDE).search(self._buffer, self._position)
            if match is None:
                self._position = max(self._position, len(self._buffer))
                break
            self._position = match.end()
            yield from self._step(match.group(), match.start())
        if len(self._buffer) > self._max_bytes:
            self._too_long = True
            self._position -= len(self._buffer)
            self._buffer.clear()

    def _step(self, character: bytes, start: int) -> Iterator[bytes | Reason]:
        if self._in_string:
            if character == b"\\":
                self._position += 1
            else:
                self._in_string = False
        elif character == b'"':
            self._in_string = True
        elif character in b"[{":
            self._depth += 1
            if self._depth == 1:
                self._drop()
        elif character in b"]}":
            self._depth -= 1
            self.at_end = self._depth == 0
            if self.at_end and (self._any or self._too_long or self._buffer[:start].strip()):
                yield self._element(start)
        elif self._depth == 1:
            self._any = True
            yield self._element(start)
            self._drop()

    def _element(self, end: int) -> bytes | Reason:
        if self._too_long:
            self._too_long = False
            return Reason.TOO_LONG
        return bytes(self._buffer[:end])

    def _drop(self) -> None:
        """The element is done; the next begins behind the comma."""
        del self._buffer[: self._position]
        self._position = 0
