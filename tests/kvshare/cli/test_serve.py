"""`kvshare serve` as a process: it says where it listens, serves, stops on SIGTERM, and fails in one line."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from delta_tree import DeltaTree
from kvshare.demo import MODEL_PATH
from tests.kvshare.cli.conftest import Cli
from tests.kvshare.cli.served import eventually, serving
from tests.small_disk import small_disk

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
def test_sighup_reads_the_settings_again(tmp_path: Path) -> None:
    """Of a server that loads, and of one that serves; a wrong file is one error, and ends nothing."""
    with serving(tmp_path, while_loading=lambda process: process.send_signal(signal.SIGHUP)) as server:
        eventually(lambda: server.logged("settings in force: nothing changed") != [])
        file = tmp_path / "kvshare.yaml"
        right = file.read_text(encoding="utf-8")
        file.write_text(right + "sharing: [", encoding="utf-8")
        server.process.send_signal(signal.SIGHUP)
        eventually(lambda: len(server.logged("SIGHUP: the settings are as before")) == 1)
        file.write_text(right.replace("max_risk: 1.0", "max_risk: 1.0, mode: exact"), encoding="utf-8")
        server.process.send_signal(signal.SIGHUP)
        eventually(lambda: server.logged("sharing.mode is exact, was approx") != [])
        assert server.ready() == (200, "ok")
        assert server.stop() == 0


@with_model
def test_a_cache_of_something_else_does_not_keep_it_down(tmp_path: Path) -> None:
    """
    A damaged store is moved aside, and so is, at the next start, one of another dtype: the old file is the
    owner's only, and nothing piles up.
    """
    store = tmp_path / ".kvshare"
    store.mkdir(mode=0o700)
    (store / "tree.sqlite3").write_bytes(b"not a database" * 100)
    for dtype, told in (("float32", "is damaged"), ("bfloat16", "another model or dtype")):
        with serving(tmp_path, "--dtype", dtype, env={"KVSHARE_COST__LEARN": "true"}) as server:
            assert server.ready() == (200, "ok")
            assert len(server.logged(told)) == 1
            server.complete(range(300, 400))
            assert server.stop() == 0
    files = [path for path in store.iterdir() if path.is_file() and path.stat().st_size]
    kept = {"costs.json", "namespaces.json", "usage.json"}
    assert {path.name for path in files} == {"tree.sqlite3", "tree.sqlite3.old", *kept}
    assert (store / "tree.sqlite3.old").read_bytes().startswith(b"SQLite format 3")


@with_model
def test_a_read_only_store_means_memory(tmp_path: Path) -> None:
    """Metadata in memory and the index in a temporary folder, each with one line; sharing goes on."""
    disk = small_disk(tmp_path / "disk", 1 << 20, options="ro")
    if disk is None:
        pytest.skip("this process may not mount a small file system")
    with serving(tmp_path, "--store", disk.folder, prefix=disk.command) as server:
        assert server.ready()[1].startswith(
            "ok; metadata of prompts are in memory, and lost with the process"
        )
        for num_cached in (0, 99):
            usage = server.complete(range(300, 400))["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == num_cached
        assert len(server.logged("in memory, and lost with the process")) == 1
        assert len(server.logged("the index is in a temporary folder")) == 1
        assert server.stop() == 0


def test_a_store_in_use_is_refused_before_the_model_is_loaded(process: Cli, tmp_path: Path) -> None:
    """The one state of a store that ends the start; a model that is not there is not even looked for."""
    store = tmp_path / "store" / "tree.sqlite3"
    with DeltaTree.open(store, identity="of the first server"):
        outcome = process("serve", "--port", 0, "--store", store.parent, "--model", "./nowhere")
    assert outcome.code == 1
    assert "another process has this store open" in outcome.stderr
    assert "nowhere" not in outcome.stderr


@pytest.mark.parametrize(("option", "told"), [(("--model", "./nowhere"), "nowhere")])
def test_serve_fails_in_one_line(process: Cli, option: tuple[str, str], told: str) -> None:
    """What keeps the server from starting is told once, with what to do, and ends it with exit code 1."""
    outcome = process("serve", "--port", 0, *option)
    assert (outcome.code, outcome.stdout) == (1, "")
    assert told in outcome.stderr.splitlines()[-1]
    assert "Traceback" not in outcome.stderr


@pytest.mark.parametrize("setting", ["port", "admin_port"])
def test_the_port_that_is_taken_is_named(process: Cli, tmp_path: Path, setting: str) -> None:
    """With its setting and what to do, before anything is loaded: neither a model nor torch."""
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "torch.py").write_text("raise RuntimeError('torch was imported')")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = tmp_path / "kvshare.yaml"
        config.write_text(f"server: {{port: 0, {setting}: {port}}}\nmodel: {{path: nowhere}}\n")
        outcome = process("serve", "--config", config, env={"PYTHONPATH": str(broken)})
    assert outcome.code == 1
    (told,) = outcome.stderr.splitlines()
    assert f"server.{setting}" in told
    assert f"127.0.0.1:{port}: address already in use; stop the server there, or set another" in told


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            ("--vllm-url", "http://localhost:8411"),
            "vllm.replicas.0.url: http://localhost:8411 is this server",
        ),
        (
            ("--vllm-url", "http://127.0.0.1:8410"),
            "vllm.replicas.0.control_url: http://127.0.0.1:8411, the port after vLLM's",
        ),
        (
            ("--vllm-url", "http://127.0.0.1:8409", "--vllm-data-parallel-size", 2),
            "vllm.replicas.0.control_url: http://127.0.0.1:8411",
        ),
        (
            ("--vllm-url", "http://127.0.0.1:9", "--vllm-control-url", "http://127.0.0.1:8411"),
            "vllm.replicas.0.control_url: http://127.0.0.1:8411 is this server itself",
        ),
    ],
)
def test_a_server_that_is_pointed_at_itself_says_so(
    process: Cli, options: tuple[object, ...], told: str
) -> None:
    """At start, with the setting: also where it is the default of the connector's address."""
    outcome = process("serve", "--engine", "vllm", "--port", 8411, *options)
    assert (outcome.code, outcome.stdout) == (2, "")
    assert told in outcome.stderr.splitlines()[-1]
    assert "this server itself" in outcome.stderr
