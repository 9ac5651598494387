"""The first process of the pool: it reads the tokenizer once, and forks a process for each grammar."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from kvshare.errors import EngineError, UnsupportedFormatError
from kvshare.grammar_pool.frames import Frame, Kind, frames_of

log = logging.getLogger(__name__)

_START_S = 60.0  # to read a tokenizer


class FirstProcess:
    """Runs until it is closed."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvshare.grammar_pool.worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "RUST_BACKTRACE": "0"},  # forty lines of addresses
                pass_fds=[theirs.fileno()],
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def set_up(self, setup: Mapping[str, Any]) -> None:
        """
        Blocks until the tokenizer is read.

        Raises:  UnsupportedFormatError if it cannot be, EngineError if it does not start; it is closed then
        """
        answer = None
        try:
            self._control.settimeout(_START_S)
            self._control.sendall(Frame(Kind.COMPILE, payload=json.dumps(setup).encode()).packed())
            answer = next(frames_of(self._control), None)
            self._control.setblocking(False)
        except OSError as exc:
            answer = None
            log.warning("the process that compiles grammars does not start: %s", type(exc).__name__)
        if answer is not None and answer.kind is not Kind.FAILED:
            return
        self.close()
        if answer is None:
            raise EngineError("the process that compiles grammars does not start")
        raise UnsupportedFormatError(answer.text, None)

    def fork(self) -> socket.socket:
        """A connection to a new process, which waits for a grammar. Raises OSError if this one has ended."""
        if self._process.poll() is not None:
            raise ConnectionError("the process has ended")
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b"f"], [theirs.fileno()])
            except OSError:
                ours.close()
                raise
        ours.setblocking(False)
        return ours

    def close(self) -> None:
        """May be called again, and while another thread is in `set_up`."""
        self._process.kill()
        self._process.wait()
        self._control.close()
