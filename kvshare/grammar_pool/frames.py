"""
The messages between server and worker over a socket: frames of a kind, a choice, and bytes.

    server -> worker   COMPILE   JSON, what to compile
                       TAKE      the next token of a choice, 4 bytes
    worker -> server   READY     the number of the process
                       MASK      the tokens that a choice may take next, a bit each, the lowest bit first
                       TAKEN     a token was taken, and more must or may follow; a MASK comes next
                       ENDED     a token was taken, and the answer is complete
                       DONE      it compiles; without a mask, as nothing will be generated here
                       FAILED    why not, as text for the client
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

_HEAD = struct.Struct("<BHI")  # kind, choice, length of the payload
_NUMBER = struct.Struct("<I")
_READ_BYTES = 65_536


class Kind(IntEnum):
    """The first byte of a frame."""

    COMPILE = 1
    TAKE = 2
    MASK = 3
    TAKEN = 4
    ENDED = 5
    DONE = 6
    FAILED = 7
    READY = 8


@dataclass(frozen=True, slots=True)
class Frame:
    """One message."""

    kind: Kind
    choice: int = 0
    payload: bytes = b""

    @property
    def text(self) -> str:
        return self.payload.decode(errors="replace")

    @property
    def number(self) -> int:
        """Return the token id of a TAKE, the process id of READY."""
        (number,) = _NUMBER.unpack(self.payload)
        return int(number)

    def packed(self) -> bytes:
        return _HEAD.pack(self.kind, self.choice, len(self.payload)) + self.payload


def take(choice: int, token_id: int) -> Frame:
    return Frame(Kind.TAKE, choice, _NUMBER.pack(token_id))


def ready(pid: int) -> Frame:
    return Frame(Kind.READY, payload=_NUMBER.pack(pid))


def failed(reason: str) -> Frame:
    return Frame(Kind.FAILED, payload=reason.encode(errors="replace"))


class FrameReader:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._received = bytearray()

    def feed(self, received: bytes) -> Iterator[Frame]:
        """Yield the frames that these bytes complete."""
        self._received += received
        while len(self._received) >= _HEAD.size:
            kind, choice, length = _HEAD.unpack_from(self._received)
            end = _HEAD.size + length
            if len(self._received) < end:
                return
            payload = bytes(self._received[_HEAD.size : end])
            del self._received[:end]
            yield Frame(Kind(kind), choice, payload)


def frames_of(connection: socket.socket) -> Iterator[Frame]:
    """Yield the frames of a blocking socket, until the other side closes it."""
    reader = FrameReader()
    while received := connection.recv(_READ_BYTES):
        yield from reader.feed(received)
