"""Ctrl-C in `kvshare replay`, on real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.kvshare.cli.conftest import Kvshare
from tests.kvshare.cli.live_replays import FORM, document_at, live_command
from tests.kvshare.cli.outcome import Outcome
from tests.kvshare.replay.tiny_engine import TinyEngine, running

TIMEOUT_S = 180


def _start(tmp_path: Path, *arguments: object) -> subprocess.Popen[str]:
    """Where Ctrl-C works, also if these tests run in the background."""
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from kvshare.cli.main import main; main()"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _interrupt(process: subprocess.Popen[str], when: Callable[[], bool]) -> Outcome:
    """Ctrl-C as soon as it came so far."""
    deadline = time.monotonic() + TIMEOUT_S
    while not when():
        assert process.poll() is None, "it ended before it could be interrupted"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    return Outcome(process.returncode, stdout, stderr)


@pytest.mark.slow
def test_an_interrupted_replay_goes_on(kvshare: Kvshare, tmp_path: Path) -> None:
    """Ctrl-C behind a checkpoint is exit code 130; --resume then ends it."""
    rows = (json.dumps({"prompt": f"question {number} of {FORM}"}) + "\n" for number in range(4000))
    (tmp_path / "log.jsonl").write_text("".join(rows), encoding="utf-8")
    arguments = ("replay", "log.jsonl", "--tokenizer", "demo", "--arms", "prefix,chunks", "--out", "out")
    part = tmp_path / "out" / "checkpoint" / "rows-00000.parquet"
    stopped = _interrupt(_start(tmp_path, *arguments), part.exists)
    assert (stopped.code, stopped.stdout) == (130, "")
    assert stopped.stderr.strip() == "interrupted; continue with --resume"
    assert kvshare(*arguments, "--resume").code == 0
    document = document_at(tmp_path / "out" / "results.json")
    assert (document["data"]["num_requests"], document["times"]["resumed"]) == (4000, 1)


@pytest.mark.usefixtures("log")
def test_an_interrupted_live_replay_keeps_what_was_answered(tmp_path: Path) -> None:
    """Three requests were answered, the fourth waits: Ctrl-C writes the three, and nothing of --resume."""
    with running(TinyEngine(max_answers=3)) as engine:
        process = _start(tmp_path, *live_command(engine, "--concurrency", 1))
        stopped = _interrupt(process, engine.held.is_set)
    assert stopped.code == 130
    assert "interrupted; the answers until then are in live" in stopped.stderr
    assert "--resume" not in stopped.stderr
    assert "interrupted: 3 requests" in stopped.stdout
    document = document_at(tmp_path / "live" / "live.json")
    assert (document["complete"], document["num_requests"]) == (False, 3)
    assert pq.read_table(tmp_path / "live" / "live.parquet").num_rows == 3


@pytest.mark.usefixtures("log")
def test_an_interrupted_live_replay_without_answers_promises_nothing(tmp_path: Path) -> None:
    """Nothing was measured: no files, and no word of going on."""
    with running(TinyEngine(max_answers=0)) as engine:
        stopped = _interrupt(_start(tmp_path, *live_command(engine)), engine.held.is_set)
    assert (stopped.code, stopped.stderr.strip()) == (130, "interrupted")
    assert not list((tmp_path / "live").iterdir())
