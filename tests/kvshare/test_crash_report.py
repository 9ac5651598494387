"""A process that native code ends says where, on stderr."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.kvshare.cli.served import eventually

TIMEOUT_S = 120
CRASH = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
FATAL = "Fatal Python error: Segmentation fault"


def is_idle(pid: int) -> bool:
    """Whether a process did nothing for a while."""
    process = psutil.Process(pid)
    before = process.cpu_times()
    time.sleep(1.5)  # a busy machine may let it wait for a part of a second
    return bool(process.cpu_times()[:2] == before[:2])


def test_a_server_that_is_ended_by_a_signal_of_the_processor_says_where(tmp_path: Path) -> None:
    """`kvshare serve` gets SIGSEGV while it runs: stderr has the stack of its threads."""
    errors = tmp_path / "stderr"
    options = ["--engine", "vllm", "--vllm-url", "http://127.0.0.1:9", "--port", "0", "--store", tmp_path]
    command = [sys.executable, "-m", "kvshare.cli.main", "serve", *map(str, options)]
    with (
        errors.open("wb") as stderr,
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr) as server,
    ):
        eventually(lambda: "listening on" in errors.read_text() or server.poll() is not None)
        # The stack of a thread that runs meanwhile cannot be read: one imports what requests need.
        eventually(lambda: is_idle(server.pid))
        server.send_signal(signal.SIGSEGV)
        assert server.wait(timeout=TIMEOUT_S) == -signal.SIGSEGV
    assert FATAL in errors.read_text()
    assert "run_forever" in errors.read_text()


def test_what_a_process_of_ours_starts_says_so_too() -> None:
    """As `kvshare vllm` becomes vLLM, and benchmarks start servers: a Python that knows nothing of us."""
    starts = (
        "import subprocess, sys; from kvshare.crash_report import report_crashes; report_crashes();"
        f"sys.exit(subprocess.run([sys.executable, '-c', {CRASH!r}]).returncode == -{int(signal.SIGSEGV)})"
    )
    done = subprocess.run([sys.executable, "-c", starts], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 1
    assert FATAL in done.stderr
