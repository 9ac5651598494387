"""What a benchmark has started ends with it, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvshare_lab.vllm.servers import Server

# A server that has a child, as vLLM has its engine: both sleep, and write their ids to a file.
_SERVER = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
path = pathlib.Path(sys.argv[1])
path.with_suffix(".new").write_text(f"{os.getpid()} {child.pid}")
path.with_suffix(".new").rename(path)
time.sleep(600)
"""
_BENCHMARK = """
import pathlib, sys, time
from kvshare_lab.vllm.servers import Server
folder = pathlib.Path(sys.argv[1])
command = [sys.executable, "-c", sys.argv[2], str(folder / "ids")]
server = Server("a server", command, "http://127.0.0.1:9", folder / "log")
server.start()
time.sleep(600)
"""


def is_running(pid: int) -> bool:
    """Also without a parent that waits for it."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def ids_in(path: Path) -> list[int]:
    """Those of the server and its child, once both run."""
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return [int(each) for each in path.read_text().split()]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_benchmark_that_is_killed_leaves_no_server(tmp_path: Path, number: signal.Signals) -> None:
    """Nor what the server has started."""
    benchmark = subprocess.Popen([sys.executable, "-c", _BENCHMARK, str(tmp_path), _SERVER])
    ids = ids_in(tmp_path / "ids")
    assert all(map(is_running, ids))
    benchmark.send_signal(number)
    benchmark.wait()
    deadline = time.monotonic() + 60
    while any(map(is_running, ids)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_server_that_is_stopped_is_watched_no_more(tmp_path: Path) -> None:
    """Its process group's id may be another's by then."""
    command = [sys.executable, "-c", _SERVER, str(tmp_path / "ids")]
    server = Server("a server", command, "http://127.0.0.1:9", tmp_path / "log")
    server.start()
    ids = ids_in(tmp_path / "ids")
    assert server._watchdog is not None
    watchdog = server._watchdog.pid
    assert os.getpgid(watchdog) == watchdog
    server.stop()
    assert not any(map(is_running, [*ids, watchdog]))
    server.stop()
