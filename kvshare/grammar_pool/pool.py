"""The server's side of the pool: it compiles a grammar in a process of its own, or says why it cannot."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from kvshare.errors import (
    EngineError,
    KVShareError,
    OverloadedError,
    ShuttingDownError,
    UnsupportedFormatError,
)
from kvshare.grammar_pool.first_process import FirstProcess
from kvshare.grammar_pool.frames import Frame, FrameReader, Kind, failed
from kvshare.grammar_pool.held_memory import HeldMemory, private_bytes
from kvshare.grammar_pool.limits import COMPILE_S, MEMORY_BYTES
from kvshare.grammar_pool.matcher import RemoteMatcher, WorkerProcess
from kvshare.grammar_pool.turns import TOO_LATE, CompileTurn, CompileTurns

log = logging.getLogger(__name__)

_NOT_RUNNING = "the process that compiles grammars does not run"
ANSWER_S = 9.5  # after which every request has its answer, waiting included
_READ_BYTES = 65_536


class GrammarPool:
    """
    Compiles grammars in other processes. All methods run on one event loop.

    The first process starts with the first grammar. If it dies, the next grammar starts another one.
    """

    def __init__(self, setup: Callable[[], Mapping[str, Any]]) -> None:
        """`setup`: returns what `compilers.new_compiler` reads; called in a thread for the first grammar."""
        self._setup = setup
        self._starting: asyncio.Future[FirstProcess] | None = None
        self._spawned: FirstProcess | None = None
        self._closing = threading.Lock()
        self._is_closed = False
        self._turns = CompileTurns()
        self._held = HeldMemory()

    def close(self) -> None:
        """End the first process. Those that compile end with their sockets."""
        with self._closing:
            self._is_closed = True
            if self._spawned is not None:
                self._spawned.close()

    async def compiled(
        self, request: Mapping[str, Any], *, key: str, param: str
    ) -> tuple[RemoteMatcher, bytes]:
        """
        Compile what is to be followed.

        Returns the process that follows it, which the caller closes, and its first mask, empty if none was
        asked for.

        Raises:  UnsupportedFormatError for `param`: it cannot be followed, or takes too much time or memory;
                 OverloadedError if too many of this key are waiting or hold too much memory, or it could
                 not be begun in time;
                 EngineError if no process can be started, ShuttingDownError after `close`
        """
        deadline = asyncio.get_running_loop().time() + ANSWER_S
        message = json.dumps(request).encode()
        async with self._turns.turn(key, message, deadline) as turn:
            for _ in range(2):  # the first process may end before it forks
                process = WorkerProcess(await self._forked_by(deadline))
                try:
                    frame = await _answer(process, message, turn, deadline)
                    if frame is not None and frame.kind is Kind.FAILED:
                        raise UnsupportedFormatError(frame.text, param)
                    if frame is not None:
                        return self._held_matcher(process, key, param), frame.payload
                except BaseException:
                    process.kill()
                    raise
                process.close()
        raise EngineError(_NOT_RUNNING)

    def _held_matcher(self, process: WorkerProcess, key: str, param: str) -> RemoteMatcher:
        """Raises OverloadedError if the answers of this key hold too much memory."""
        template = None if self._spawned is None else self._spawned.pid
        num_bytes = max(0, private_bytes(process.pid) - private_bytes(template))
        self._held.add(key, num_bytes)
        return RemoteMatcher(process, param=param, on_close=partial(self._held.release, key, num_bytes))

    async def _forked_by(self, deadline: float) -> socket.socket:
        try:
            async with asyncio.timeout_at(deadline):
                return await self._fork()
        except TimeoutError:
            raise OverloadedError(
                "the process that compiles grammars still starts; try again later"
            ) from None

    async def _fork(self) -> socket.socket:
        """Return a connection to a new process. Raises EngineError, and what `_start` does."""
        for _ in range(2):  # the first process may have died since
            if self._starting is None:
                self._starting = asyncio.ensure_future(asyncio.to_thread(self._start))
                self._starting.add_done_callback(_look_at)  # all who wait for it may have left
            starting = self._starting
            try:
                # Others wait for it, too: a client that leaves does not end it.
                return (await asyncio.shield(starting)).fork()
            except OSError:
                log.warning("the process that compiles grammars has ended; another one is started")
            except KVShareError:
                self._forget(starting)
                raise
            self._forget(starting)
        raise EngineError(_NOT_RUNNING)

    def _forget(self, starting: asyncio.Future[FirstProcess]) -> None:
        if self._starting is starting:
            self._starting = None

    def _start(self) -> FirstProcess:
        """Runs in a thread, until the tokenizer is read. Raises what `set_up` does; ShuttingDownError."""
        with self._closing:
            if self._is_closed:
                raise ShuttingDownError("this server is stopping")
            if self._spawned is not None:
                self._spawned.close()
            template = self._spawned = FirstProcess()
        template.set_up(self._setup())
        return template


def _look_at(starting: asyncio.Future[FirstProcess]) -> None:
    """Else asyncio logs an error that no task has waited for."""
    if not starting.cancelled():
        starting.exception()


async def _answer(process: WorkerProcess, message: bytes, turn: CompileTurn, deadline: float) -> Frame | None:
    """
    Compile what `message` asks for, and return the outcome, also if the process dies or is too slow. None if
    there never was a process.

    Raises:  OverloadedError if so long a wait came before that it had less time than others
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    give_way = asyncio.ensure_future(turn.gives_way.wait())
    receiving = asyncio.ensure_future(_first_frame(loop, process, message))
    try:
        await asyncio.wait(
            [receiving, give_way], timeout=deadline - began, return_when=asyncio.FIRST_COMPLETED
        )
        if receiving.done():
            return receiving.result() or (None if process.pid is None else _death(loop.time() - began))
        if give_way.done():
            return failed("it takes long to compile, and other clients' schemas waited for that")
        if process.pid is None or deadline - began < COMPILE_S:
            raise OverloadedError(TOO_LATE)
        return failed(f"it took more than {COMPILE_S:g} s to compile")
    finally:
        for task in (receiving, give_way):
            task.cancel()
        await asyncio.gather(receiving, give_way, return_exceptions=True)


async def _first_frame(
    loop: asyncio.AbstractEventLoop, process: WorkerProcess, message: bytes
) -> Frame | None:
    """Return the outcome of a grammar; None if the process has ended without reporting it."""
    reader = FrameReader()
    with suppress(OSError):
        await loop.sock_sendall(process.connection, Frame(Kind.COMPILE, payload=message).packed())
        while received := await loop.sock_recv(process.connection, _READ_BYTES):
            for frame in reader.feed(received):
                if frame.kind is not Kind.READY:
                    return frame
                process.pid = frame.number
    process.has_ended = True
    return None


def _death(seconds: float) -> Frame:
    """Return why a process ended that was to compile for so long: it says nothing itself."""
    if seconds >= COMPILE_S:
        return failed(f"it took more than {COMPILE_S:g} s to compile")
    return failed(f"its compiler failed, or needed more than {MEMORY_BYTES // 2**20} MiB")
