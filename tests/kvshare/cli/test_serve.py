"""`kvshare serve` as a process: it says where it listens, serves, stops on SIGTERM, and fails in one line."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from kvshare.demo import MODEL_PATH
from tests.kvshare.cli.conftest import Cli
from tests.kvshare.cli.served import eventually, serving

pytestmark = pytest.mark.slow  # each imports torch in a process of its own


def with_model(test: Callable[..., None]) -> Callable[..., None]:
    """For tests that serve the bundled model."""
    missing = pytest.mark.skipif(not MODEL_PATH.exists(), reason="the demo model has not been built")
    marked: Callable[..., None] = pytest.mark.model(missing(test))
    return marked


@with_model
def test_serve_says_when_it_is_ready_and_stops_on_sigterm(tmp_path: Path) -> None:
    """The announced address is loopback and answers /ready with 200; SIGTERM ends it with exit code 0."""
    with serving(tmp_path) as server:
        assert server.url.startswith("http://127.0.0.1:")
        assert server.ready() == (200, "ok")
        assert server.stop() == 0
    lines = server.log_file.read_text(encoding="utf-8").splitlines()
    assert all(json.loads(line)["level"] for line in lines if line.startswith("{"))


@with_model
def test_sighup_is_ignored_with_one_line(tmp_path: Path) -> None:
    """The habit of many operators neither ends a server that loads, nor one that serves."""
    with serving(tmp_path, while_loading=lambda process: process.send_signal(signal.SIGHUP)) as server:
        server.process.send_signal(signal.SIGHUP)
        eventually(lambda: len(server.logged("SIGHUP ignored")) == 2)
        assert server.ready() == (200, "ok")
        assert server.stop() == 0


@pytest.mark.parametrize(
    ("option", "told"),
    [(("--model", "./nowhere"), "nowhere"), (("--store", "damaged"), "kvshare evict --all")],
)
def test_serve_fails_in_one_line(cli: Cli, tmp_path: Path, option: tuple[str, str], told: str) -> None:
    """What keeps the server from starting is told once, with what to do, and ends it with exit code 1."""
    if option[0] == "--store" and not MODEL_PATH.exists():
        pytest.skip("the demo model has not been built")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "tree.sqlite3").write_bytes(b"not a database" * 100)
    outcome = cli("serve", "--port", 0, *option)
    assert (outcome.code, outcome.stdout) == (1, "")
    assert told in outcome.stderr.splitlines()[-1]
    assert "Traceback" not in outcome.stderr
