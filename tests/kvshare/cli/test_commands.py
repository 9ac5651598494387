"""The commands that need no store: help, version, hash-key, serve --dry-run, doctor."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from kvshare import __version__
from kvshare.settings import load_settings
from tests.kvshare.cli.conftest import Cli

COMMANDS = [
    "serve",
    "vllm",
    "doctor",
    "version",
    "explain",
    "stats",
    "tree",
    "node",
    "diff",
    "evict",
    "hash-key",
    "workload",
    "bench",
    "calibrate",
]


def test_help_names_every_command(cli: Cli) -> None:
    """--help lists the commands and the exit codes, and imports nothing heavy."""
    outcome = cli("--help")
    assert outcome.code == 0
    for command in COMMANDS:
        assert f"  {command} " in outcome.stdout
    assert "3 server unreachable" in outcome.stdout


def test_help_does_not_import_what_is_heavy(cli: Cli) -> None:
    """The modules behind `kvshare --help` load neither torch, rich, pydantic, numpy nor HTTP."""
    heavy = "{'torch', 'rich', 'pydantic', 'numpy', 'aiohttp', 'yaml', 'http', 'delta_tree', 'kvshare_lab'}"
    program = (
        "import sys; from kvshare.cli.main import app; app(['--help'], standalone_mode=False); "
        f"print(sorted({heavy} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_no_arguments_show_the_help(cli: Cli) -> None:
    """`kvshare` alone tells what there is."""
    outcome = cli()
    assert "serve" in outcome.stdout + outcome.stderr


def test_version_names_itself_and_its_libraries(cli: Cli) -> None:
    """The document has KVShare's version, and null for a library that is not there."""
    document = cli("version", "--format", "json").document
    assert document["kvshare"] == __version__
    assert "torch" in document["libraries"]


def test_hash_key_reads_stdin(cli: Cli) -> None:
    """The key is hashed without the line's end, as the server does with the key that a client sends."""
    expected = hashlib.sha256(b"sk-secret").hexdigest()
    assert cli("hash-key", stdin="sk-secret\n").stdout.strip() == expected


def test_hash_key_makes_a_key(cli: Cli) -> None:
    """A generated key is long and comes with its hash."""
    made = cli("hash-key", "--generate", "--format", "json").document
    assert len(made["key"]) >= 40
    assert made["sha256"] == hashlib.sha256(made["key"].encode()).hexdigest()


def test_hash_key_wants_a_key(cli: Cli) -> None:
    """An empty stdin is wrong usage."""
    assert cli("hash-key", stdin="\n").code == 2


def test_serve_dry_run_prints_a_config(cli: Cli, tmp_path: Path) -> None:
    """The resolved settings come as YAML that serve takes back, with options over file over defaults."""
    config = tmp_path / "kvshare.yaml"
    config.write_text("server: {port: 1234}\nsharing: {mode: exact}\n")
    given = ("--port", 4321, "--dtype", "bfloat16", "--served-name", "support")
    outcome = cli("serve", "--dry-run", "--config", config, *given)
    assert outcome.code == 0
    settings = yaml.safe_load(outcome.stdout)
    assert settings["model"]["served_name"] == "support"
    assert settings["server"] == {**settings["server"], "host": "127.0.0.1", "port": 4321}
    assert (settings["sharing"]["mode"], settings["model"]["dtype"]) == ("exact", "bfloat16")
    config.write_text(outcome.stdout)
    assert load_settings(config).server.port == 4321


def test_vllm_names_its_models_itself(cli: Cli) -> None:
    """A name for a model that another process serves is refused with the option that gives it."""
    vllm = ("--engine", "vllm", "--vllm-url", "http://a:8000")
    outcome = cli("serve", "--dry-run", *vllm, "--served-name", "support")
    assert outcome.code != 0
    assert "--served-model-name" in outcome.stderr


def test_serve_takes_vllm_servers_by_their_addresses(cli: Cli) -> None:
    """Each with its control server: given in the same order, or the next port."""
    given = (
        "serve",
        "--dry-run",
        "--engine",
        "vllm",
        "--vllm-url",
        "http://a:8000",
        "--vllm-url",
        "http://b/",
    )
    settings = yaml.safe_load(cli(*given).stdout)
    assert settings["engine"]["kind"] == "vllm"
    assert [entry["url"] for entry in settings["vllm"]["replicas"]] == ["http://a:8000", "http://b"]
    controls = ("--vllm-control-url", "http://a:1", "--vllm-control-url", "http://b:2")
    settings = yaml.safe_load(cli(*given, *controls).stdout)
    assert [entry["control_url"] for entry in settings["vllm"]["replicas"]] == ["http://a:1", "http://b:2"]
    settings = yaml.safe_load(cli(*given, "--vllm-data-parallel-size", 4).stdout)
    assert [entry["data_parallel_size"] for entry in settings["vllm"]["replicas"]] == [4, 4]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--vllm-url", "host:8000"), "vllm.replicas.0.url"),
        (("--vllm-url", "http://a", "--vllm-control-url", "http://a", "--vllm-control-url", "x"), "one per"),
        ((), "--vllm-url"),
        (("--vllm-url", "http://a:8000", "--vllm-url", "http://a:8000"), "named alike"),
    ],
)
def test_serve_tells_what_is_wrong_with_vllm_servers(cli: Cli, arguments: tuple[str, ...], told: str) -> None:
    """In one line, before anything is started."""
    outcome = cli("serve", "--engine", "vllm", "--port", 0, *arguments)
    assert outcome.code != 0
    assert told in outcome.stderr.splitlines()[-1]
    assert "Traceback" not in outcome.stderr


def test_serve_names_the_path_of_an_unknown_key(cli: Cli, tmp_path: Path) -> None:
    """A config with an unknown key is exit code 2 and one line with the key's path."""
    config = tmp_path / "kvshare.yaml"
    config.write_text("sharing: {moode: exact}\n")
    outcome = cli("serve", "--config", config)
    assert (outcome.code, outcome.stdout) == (2, "")
    assert "sharing.moode" in outcome.stderr
    assert outcome.stderr.count("\n") == 1


def test_serve_refuses_wrong_options(cli: Cli) -> None:
    """A value outside an option's choices is wrong usage."""
    assert cli("serve", "--mode", "most").code == 2


def test_doctor_names_a_wrong_setting(cli: Cli, tmp_path: Path) -> None:
    """With a config that cannot be read, doctor says which key, looks no further, and ends with 1."""
    config = tmp_path / "kvshare.yaml"
    config.write_text("engine: {max_running: many}\n")
    outcome = cli("doctor", "--config", config, "--format", "json")
    assert outcome.code == 1
    checks = {check["name"]: check for check in outcome.document["checks"]}
    assert outcome.document["ok"] is False
    assert checks["python"]["state"] == "ok"
    assert checks["config"]["state"] == "fail"
    assert "engine.max_running" in checks["config"]["detail"]
    assert checks["config"]["remedy"]
