"""
The services of deploy/compose.yaml, started one by one as processes with its settings: vLLM with the default
chat model, the proxy, and Prometheus where it is installed (Debian's package `prometheus`).

Only what belongs to containers is another: hosts, ports, folders, the model, how much memory.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvshare.chat_model.prepare import prepare
from kvshare_lab.vllm import servers
from kvshare_lab.vllm.ports import free_ports
from kvshare_lab.vllm.servers import Server, VllmOptions
from tests.deploy.containers import DEPLOY, Process, compose, processes

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(sys.platform != "linux", reason="vLLM's CPU wheel is built for Linux"),
]

KVSHARE = (sys.executable, "-m", "kvshare.cli.main")
PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
WAIT_S = 60.0
KEYS = {"shop": ("shop", "infer"), "operators": ("operators", "admin")}
"""As docs/deploying.md has them; each key is its name."""


@dataclass(frozen=True)
class Stack:
    """`api` and `admin`: addresses of the proxy."""

    folder: Path
    vllm: Server
    proxy: Server
    api: str
    admin: str


def service(name: str) -> Process:
    (found,) = [each for each in processes() if each.name == f"compose {name}"]
    return found


def with_values(arguments: tuple[str, ...], **values: object) -> list[str]:
    """The arguments with other values of these options, each of which must be there."""
    words = list(arguments)
    for name, value in values.items():
        option = f"--{name.replace('_', '-')}="
        (place,) = [place for place, word in enumerate(words) if word.startswith(option)]
        words[place] = f"{option}{value}"
    return words


def the_vllm(folder: Path, port: int, control_port: int) -> Server:
    process, options = service("vllm"), VllmOptions(dtype="float32", max_model_len=4096, enforce_eager=True)
    own = {"port": port, "control_port": control_port, "control_host": "127.0.0.1"}
    smaller = {"kv_bytes": "128MiB", "disk_bytes": "256MiB", "disk": folder / "kv"}
    command, model, *rest = with_values(process.arguments, **own, **smaller)
    assert model == "Qwen/Qwen3-8B"
    return Server(
        name="vllm",
        command=[*KVSHARE, command, str(prepare()), *rest, *options.arguments],
        url=f"http://127.0.0.1:{port}",
        log_path=folder / "vllm.log",
        environment={**process.environment, **options.environment},
    )


def the_proxy(folder: Path, port: int, admin_port: int, replicas: str) -> Server:
    process = service("kvshare")
    assert process.settings is not None
    (folder / "settings.yaml").write_text(process.settings, encoding="utf-8")
    entries = [
        {"name": name, "tenant": tenant, "role": role, "sha256": hashlib.sha256(name.encode()).hexdigest()}
        for name, (tenant, role) in KEYS.items()
    ]
    (folder / "keys.yaml").write_text(yaml.safe_dump({"keys": entries}), encoding="utf-8")
    place = {
        "KVSHARE_SERVER__HOST": "127.0.0.1",
        "KVSHARE_SERVER__PORT": str(port),
        "KVSHARE_SERVER__ADMIN_PORT": str(admin_port),
        "KVSHARE_STORE__PATH": str(folder / "store"),
        "KVSHARE_AUTH__KEYS_FILE": str(folder / "keys.yaml"),
        "KVSHARE_VLLM__REPLICAS": replicas,
    }
    assert list(process.arguments) == ["serve", "--config", "/etc/kvshare/settings.yaml"]
    return Server(
        name="kvshare",
        command=[*KVSHARE, "serve", "--config", str(folder / "settings.yaml")],
        url=f"http://127.0.0.1:{admin_port}",
        log_path=folder / "kvshare.log",
        environment={**process.environment, **place},
        ready_path="/ready",
    )


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Both, the proxy after its vLLM, as `depends_on` says."""
    folder = tmp_path_factory.mktemp("compose")
    port, control_port, api, admin = free_ports(4)
    assert compose()["services"]["kvshare"]["depends_on"] == ["vllm"]
    replicas = service("kvshare").environment["KVSHARE_VLLM__REPLICAS"]
    for name, number in (("vllm:8000", port), ("vllm:8001", control_port)):
        assert name in replicas
        replicas = replicas.replace(name, f"127.0.0.1:{number}")
    vllm, proxy = the_vllm(folder, port, control_port), the_proxy(folder, api, admin, replicas)
    with servers.running([vllm, proxy], one_by_one=True):
        yield Stack(folder, vllm, proxy, f"http://127.0.0.1:{api}", proxy.url)


def call(url: str, key: str | None = None, body: Mapping[str, Any] | None = None) -> tuple[int, str, Any]:
    """Status, body and headers."""
    headers = {"Content-Type": "application/json"} | ({} if key is None else {"x-api-key": key})
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=WAIT_S) as response:
            return response.status, response.read().decode(), response.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), error.headers


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_a_team_is_served_and_shares(stack: Stack) -> None:
    """By its key only; what is sent again is shared in the mode of the settings; vLLM has its secret."""
    text = "The office opens at nine and closes at five. Keys are at the desk. " * 30
    model = json.loads(call(f"{stack.api}/v1/models", "shop")[1])["data"][0]["id"]
    body = {"model": model, "max_tokens": 2, "messages": [{"role": "user", "content": text}]}
    assert call(f"{stack.api}/v1/chat/completions", None, body)[0] == 401
    assert call(f"{stack.vllm.url}/v1/chat/completions", None, body)[0] == 401
    eventually(lambda: "1 share" in call(f"{stack.admin}/ready")[1])
    assert call(f"{stack.api}/v1/chat/completions", "shop", body)[0] == 200

    def is_shared() -> bool:
        status, _, headers = call(f"{stack.api}/v1/chat/completions", "shop", body)
        return status == 200 and headers["X-KVShare-Decision"] == "exact"

    eventually(is_shared)
    assert (stack.folder / "store" / "tree.sqlite3").exists()
    assert any((stack.folder / "kv").rglob("*"))


def test_operators_have_a_port_of_their_own(stack: Stack) -> None:
    """With dashboard and metrics, for keys of the role admin."""
    assert call(f"{stack.admin}/admin/ui/")[0] == 200
    assert call(f"{stack.admin}/metrics", "shop")[0] == 403
    status, text, _ = call(f"{stack.admin}/metrics", "operators")
    assert status == 200
    assert "kvshare_replica_up" in text
    assert call(f"{stack.api}/metrics", "operators")[0] == 404


@pytest.fixture
def configured(stack: Stack, tmp_path: Path) -> Path:
    """Prometheus' file as it is mounted, with the addresses of these processes."""
    text = (DEPLOY / "prometheus" / "prometheus.yaml").read_text(encoding="utf-8")
    for name, url in (("kvshare:8081", stack.admin), ("vllm:8000", stack.vllm.url)):
        assert name in text
        text = text.replace(name, url.removeprefix("http://"))
    (tmp_path / "metrics-key").write_text("operators", encoding="utf-8")
    text = text.replace("/etc/prometheus/metrics-key", str(tmp_path / "metrics-key")).replace("15s", "1s")
    shutil.copy(DEPLOY / "prometheus" / "alerts.yaml", tmp_path)
    (tmp_path / "prometheus.yml").write_text(text, encoding="utf-8")
    return tmp_path / "prometheus.yml"


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool here: apt-get install prometheus")
def test_promtool_finds_no_fault(configured: Path, stack: Stack) -> None:
    """Neither in the configuration with its rules, nor in the metrics."""
    assert PROMTOOL is not None
    checked = subprocess.run([PROMTOOL, "check", "config", str(configured)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "rules found" in checked.stdout
    text = call(f"{stack.admin}/metrics", "operators")[1]
    linted = subprocess.run([PROMTOOL, "check", "metrics"], input=text, capture_output=True, text=True)
    assert (linted.returncode, linted.stdout + linted.stderr) == (0, "")


@pytest.mark.skipif(PROMETHEUS is None, reason="no Prometheus here: apt-get install prometheus")
def test_prometheus_reads_both_and_takes_the_rules(configured: Path, tmp_path: Path) -> None:
    port = free_ports(1)[0]
    own = [f"--storage.tsdb.path={tmp_path / 'data'}", f"--web.listen-address=127.0.0.1:{port}"]
    server = Server(
        name="prometheus",
        command=[str(PROMETHEUS), f"--config.file={configured}", *own],
        url=f"http://127.0.0.1:{port}",
        log_path=tmp_path / "prometheus.log",
        ready_path="/-/ready",
    )
    with servers.running([server]):

        def asked(path: str) -> Any:
            return json.loads(call(f"{server.url}/api/v1/{path}")[1])["data"]

        def states() -> dict[str, str]:
            return {each["labels"]["job"]: each["health"] for each in asked("targets")["activeTargets"]}

        eventually(lambda: states() == {"kvshare": "up", "vllm": "up"})
        rules = [rule for group in asked("rules")["groups"] for rule in group["rules"]]
        eventually(
            lambda: (
                {rule["health"] for group in asked("rules")["groups"] for rule in group["rules"]} == {"ok"}
            )
        )
        alerts = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text(encoding="utf-8"))
        assert len(rules) == sum(len(group["rules"]) for group in alerts["groups"])
