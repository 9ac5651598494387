"""`kvshare serve` as a process: it says where it listens, serves, stops on SIGTERM, and fails in one line."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from itertools import takewhile
from pathlib import Path

import pytest

from kvshare.demo import MODEL_PATH
from tests.kvshare.cli.conftest import Cli

pytestmark = pytest.mark.slow  # each imports torch in a process of its own
START_S = 60


@pytest.mark.model
@pytest.mark.skipif(not MODEL_PATH.exists(), reason="the demo model has not been built")
def test_serve_says_when_it_is_ready_and_stops_on_sigterm(tmp_path: Path) -> None:
    """The announced address is loopback and answers /ready with 200; SIGTERM ends it with exit code 0."""
    config = tmp_path / "kvshare.yaml"
    config.write_text("index: {dense: false}\nlogging: {json: true}\n")
    command = [sys.executable, "-m", "kvshare.cli.main", "serve", "--model", "demo", "--port", "0"]
    with (
        (tmp_path / "log").open("w+") as log,
        subprocess.Popen(
            [*command, "--config", str(config), "--format", "json"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as server,
    ):
        try:
            assert server.stdout is not None
            document = json.loads("".join(takewhile(lambda line: line != "}\n", server.stdout)) + "}")
            assert document["url"].startswith("http://127.0.0.1:")
            with urllib.request.urlopen(f"{document['url']}/ready", timeout=START_S) as response:
                assert response.status == 200
        finally:
            server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=START_S) == 0
        log.seek(0)
        lines = log.read().splitlines()
    assert all(json.loads(line)["level"] for line in lines if line.startswith("{"))


@pytest.mark.parametrize(
    ("option", "told"),
    [
        (("--model", "./nowhere"), "nowhere"),
        (("--model", "demo", "--store", "damaged"), "kvshare evict --all"),
    ],
)
def test_serve_fails_in_one_line(cli: Cli, tmp_path: Path, option: tuple[str, str], told: str) -> None:
    """What keeps the server from starting is told once, with what to do, and ends it with exit code 1."""
    if "--store" in option and not MODEL_PATH.exists():
        pytest.skip("the demo model has not been built")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "tree.sqlite3").write_bytes(b"not a database" * 100)
    outcome = cli("serve", "--port", 0, *option)
    assert (outcome.code, outcome.stdout) == (1, "")
    assert told in outcome.stderr.splitlines()[-1]
    assert "Traceback" not in outcome.stderr
