"""
The processes that compile: `python -m kvshare.grammar_pool.worker FD`.

The first one reads the tokenizer, once, from the socket FD, and forks a process for each socket that it gets.
That one compiles one grammar and, if an answer is to follow it, computes its masks until the socket closes.

Each limits its own address space and time, beyond which the kernel ends it: a call of a foreign library
cannot be interrupted otherwise. The process that forks has one thread, and torch is not imported.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from kvshare.grammar_pool.compilers import Compiler, Matcher, UnsupportedGrammarError, new_compiler
from kvshare.grammar_pool.frames import Frame, Kind, failed, frames_of, ready
from kvshare.grammar_pool.limits import COMPILE_S, MASK_S, MEMORY_BYTES
from kvshare.safe_logging import classes_and_places

_NICENESS = 4  # of compiling: against the model's threads it has 3 parts of 10


def main() -> None:
    """Read what the first frame says, then fork until the server closes the socket."""
    control = socket.socket(fileno=int(sys.argv[1]))
    setup = next(frames_of(control), None)
    if setup is None:
        return
    try:
        compiler = new_compiler(json.loads(setup.payload))
    except UnsupportedGrammarError as exc:
        control.sendall(failed(str(exc)).packed())
        return
    control.sendall(Frame(Kind.DONE).packed())
    errors = _quiet_libraries()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended ones leave no zombies
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole group; the server closes the socket
    while True:
        message, handles, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        if os.fork() == 0:
            control.close()
            _run_forked(compiler, socket.socket(fileno=handles[0]), errors)
        os.close(handles[0])


def _quiet_libraries() -> TextIO:
    """
    Keep what libraries print about a client's grammar from the server's stderr, except the place of a crash.

    Returns that stderr.
    """
    errors = os.fdopen(os.dup(2), "w", encoding="utf-8")
    faulthandler.enable(file=errors, all_threads=False)
    with open(os.devnull, "w", encoding="ascii") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    return errors


def _run_forked(compiler: Compiler, connection: socket.socket, errors: TextIO) -> None:
    """Never returns: what the parent would do at its end is not this process's to do."""
    status = 1
    try:
        _limit_memory()
        connection.sendall(ready(os.getpid()).packed())
        _serve(compiler, connection)
        status = 0
    except (BrokenPipeError, ConnectionResetError):
        status = 0  # the server does not wait any longer
    except MemoryError:
        with suppress(OSError):
            connection.sendall(failed("it needs too much memory").packed())
    except Exception as exc:  # noqa: BLE001  the server sees only that this process has ended
        print(f"a process that compiles grammars failed: {classes_and_places(exc)}", file=errors, flush=True)
    finally:
        os._exit(status)


def _serve(compiler: Compiler, connection: socket.socket) -> None:
    frames = frames_of(connection)
    request = next(frames, None)
    if request is None:
        return
    try:
        with _time_limit(COMPILE_S):
            matcher = _niced(lambda: compiler.compile(json.loads(request.payload)))
            first = None if matcher is None else matcher.mask()
    except UnsupportedGrammarError as exc:
        connection.sendall(failed(str(exc)).packed())
        return
    if matcher is None or first is None:
        connection.sendall(Frame(Kind.DONE).packed())
        return
    _do_not_interrupt()
    connection.sendall(Frame(Kind.MASK, payload=first).packed())
    choices: dict[int, Matcher] = {}
    for frame in frames:
        if frame.choice not in choices:
            choices[frame.choice] = matcher.copy()
        _take(choices[frame.choice], frame, connection)


def _take(matcher: Matcher, frame: Frame, connection: socket.socket) -> None:
    """Take a token; then find which may be next, while the model computes."""
    try:
        _limit_cpu(MASK_S)
        ended = matcher.take(frame.number)
        connection.sendall(Frame(Kind.ENDED if ended else Kind.TAKEN, frame.choice).packed())
        if not ended:
            connection.sendall(Frame(Kind.MASK, frame.choice, matcher.mask()).packed())
    except UnsupportedGrammarError as exc:
        connection.sendall(Frame(Kind.FAILED, frame.choice, str(exc).encode()).packed())


def _niced(compile_: Callable[[], Matcher | None]) -> Matcher | None:
    """Return the function's result, computed at a lower priority than later work of this process."""
    results: list[Matcher | None] = []
    errors: list[BaseException] = []

    def run() -> None:
        with suppress(OSError):  # where only whole processes have a priority
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            results.append(compile_())
        except BaseException as exc:  # noqa: BLE001  raised again below
            errors.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _limit_cpu(seconds: float) -> None:
    """End the process when it has computed for so long. Time in which others compute does not count."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _do_not_interrupt() -> None:
    """
    Let a thread that sends a token compute on, where this process would take its processor for the reply.

    It gets its share nevertheless, and all of it when that thread waits.
    """
    if hasattr(os, "SCHED_BATCH"):  # Linux
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Inside, the process ends after this time, wherever it is."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime + 2 * seconds) + 1, most))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_CPU, (most, most))


def _limit_memory() -> None:
    """Also no core file, which would contain the grammar."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError, ValueError):  # without /proc: other systems do not keep this limit anyway
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
        limit = pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main()
