"""
The server's end of a process that follows one grammar, for all choices of a request.

`take` sends a token; `poll` gives what came back. While the process finds the next mask, the model computes.
Nothing here waits longer than the caller says, so that a slow grammar delays its own answer only.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from kvshare.errors import UnsupportedFormatError
from kvshare.grammar_pool.frames import Frame, FrameReader, Kind, take
from kvshare.grammar_pool.limits import MASK_WAIT_S

_SEND_S = 1.0
_ONE_ROUND_S = 0.001  # in which all choices of a request are polled
_READ_BYTES = 65_536


class WorkerProcess:
    """A process that was forked for one grammar, by its socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.pid: int | None = None  # it says so itself
        self.has_ended = False

    def close(self) -> None:
        """The process ends when it next waits for a token."""
        self.has_ended = True
        self.connection.close()

    def kill(self) -> None:
        """End the process at once, which may be in a long call."""
        if self.pid is not None and not self.has_ended:
            with suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)
        self.close()


class RemoteMatcher:
    """A grammar that compiled. One thread takes tokens; another may close it at any time."""

    def __init__(
        self,
        process: WorkerProcess,
        *,
        param: str | None,
        on_close: Callable[[], object] = lambda: None,
    ) -> None:
        """`param`: of the request, that errors name. `on_close`: called once, when it is closed."""
        self._process = process  # its socket does not block
        self._readable = select.poll()
        self._readable.register(process.connection, select.POLLIN)
        self._on_close: Callable[[], object] | None = on_close
        self._param = param
        self._reader = FrameReader()
        self._frames: dict[int, deque[Frame]] = {}
        self._sent_at: dict[int, float] = {}
        self._lock = threading.Lock()  # held for as long as `poll` waits
        self._waits_again_at = 0.0

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def take(self, choice: int, token_id: int) -> None:
        """Advance a choice by a token. Replies: whether it has ended; if not, its next mask."""
        self._sent_at[choice] = time.monotonic()
        with self._lock, suppress(OSError):  # it has ended: `poll` says so
            self._send(take(choice, token_id).packed())

    def poll(self, choice: int, *, wait_s: float) -> Frame | None:
        """
        Return the next reply for a choice; None if there is none yet.

        Raises:  UnsupportedFormatError if the grammar can be followed no further
        """
        frames = self._frames.setdefault(choice, deque())
        if not frames:
            with self._lock:
                self._receive(frames, wait_s)
        if frames:
            frame = frames.popleft()
            if frame.kind is Kind.FAILED:
                raise UnsupportedFormatError(frame.text, self._param)
            return frame
        if self._process.has_ended:
            raise UnsupportedFormatError("its next tokens took too much time or memory to find", self._param)
        if time.monotonic() - self._sent_at.get(choice, time.monotonic()) > MASK_WAIT_S:
            with self._lock:
                self._process.kill()
            raise UnsupportedFormatError(
                f"its next tokens took more than {MASK_WAIT_S:g} s to find", self._param
            )
        return None

    def close(self) -> None:
        """The process ends. Waits some milliseconds at most."""
        with self._lock:
            self._process.close()
            on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()

    def _send(self, message: bytes) -> None:
        """Raises OSError if the process has ended, or reads nothing for long."""
        connection = self._process.connection
        with suppress(BlockingIOError):
            message = message[connection.send(message) :]
        if message:
            connection.settimeout(_SEND_S)
            try:
                connection.sendall(message)
            finally:
                connection.setblocking(False)

    def _receive(self, frames: deque[Frame], wait_s: float) -> None:
        """Read what is there. Then wait for one of these frames, not longer than `wait_s`."""
        self._read()
        if frames or not wait_s or (now := time.monotonic()) < self._waits_again_at:
            return
        until = now + wait_s
        while not frames and not self._process.has_ended and now < until:
            if self._readable.poll(1e3 * (until - now)):
                self._read()
            now = time.monotonic()
        if not frames:
            # Choices are polled one after the other: where one has waited in vain, others do not wait, too.
            self._waits_again_at = now + _ONE_ROUND_S

    def _read(self) -> None:
        """Sort what has arrived by choice."""
        process = self._process
        try:
            received = b"" if process.has_ended else process.connection.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        process.has_ended = not received
        for frame in self._reader.feed(received):
            self._frames.setdefault(frame.choice, deque()).append(frame)
