"""What deploy/ starts is what `kvshare` takes: commands, options, settings, ports, routes, times."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer._click.exceptions import UsageError

from kvshare.cli.connector_options import parse_bytes
from kvshare.cli.main import app
from kvshare.errors import ConfigError
from kvshare.settings import Settings, load_settings
from proxy.openapi.common_routes import COMMON_ROUTES
from proxy.openapi.operation import RouteAccess
from tests.deploy.containers import (
    DEPLOY,
    IMAGES,
    ROOT,
    Process,
    compose,
    instructions,
    pods,
    processes,
    unit,
)

ALL = processes()
SERVERS = [each for each in ALL if each.command == "serve"]
VLLMS = [each for each in ALL if each.command == "vllm" and len(each.arguments) > 2]
VLLM_OPTIONS = {"--host", "--port"}  # of `vllm serve`, as `kvshare vllm` reads them, too
VLLM_VARIABLES = {"VLLM_API_KEY"}
OF_OTHERS = {"HF_HOME", "HOME", "PATH", "PYTHONDONTWRITEBYTECODE", "XDG_CACHE_HOME"}
REFERENCE = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
OPEN_ROUTES = {each.route for each in COMMON_ROUTES if each.access is RouteAccess.OPEN}


def parameters(process: Process) -> dict[str, Any]:
    """The arguments as the command reads them. Raises its usage error."""
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    command = group.commands[process.command]
    return dict(command.make_context(process.command, list(process.arguments[1:])).params)


def settings_of(process: Process, folder: Path, patch: pytest.MonkeyPatch) -> Settings:
    """What `kvshare serve` would start with. Raises ConfigError."""
    for name, value in process.environment.items():
        if name.startswith("KVSHARE_"):
            patch.setenv(name, value)
    file = folder / "settings.yaml"
    file.write_text(process.settings or "{}", encoding="utf-8")
    patch.setenv("KVSHARE_AUTH__KEYS", "[]")
    return load_settings(file)


@pytest.mark.parametrize("process", ALL, ids=lambda each: each.name)
def test_options_are_those_of_the_command(process: Process, tmp_path: Path) -> None:
    """The parser of the command takes them; what `kvshare vllm` leaves to vLLM are known options of it."""
    arguments = list(process.arguments)
    if "--config" in arguments:  # the parser asks that the file exists
        (tmp_path / "settings.yaml").touch()
        arguments[arguments.index("--config") + 1] = str(tmp_path / "settings.yaml")
    found = parameters(Process(process.name, tuple(arguments), {}))
    rest = [word for word in found.get("arguments", []) if word.startswith("--") and word != "--help"]
    assert {word.partition("=")[0] for word in rest} <= VLLM_OPTIONS


def test_an_unknown_option_is_found() -> None:
    """The check above rejects an option that does not exist."""
    with pytest.raises(UsageError, match="No such option"):
        parameters(Process("wrong", ("serve", "--prot", "8080"), {}))


@pytest.mark.parametrize("process", ALL, ids=lambda each: each.name)
def test_variables_are_read_by_the_process(process: Process) -> None:
    """Each is a setting, one that docs/reference.md has, or known of vLLM, Python or Hugging Face."""
    for name in process.environment:
        if "__" not in name:
            own = name in re.findall(r"^\| `(KVSHARE_\w+)` \|", REFERENCE, re.MULTILINE)
            assert own or name in OF_OTHERS or (name in VLLM_VARIABLES and process.command == "vllm"), name


@pytest.mark.parametrize("process", SERVERS, ids=lambda each: each.name)
def test_settings_are_valid(process: Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File and variables together are settings, whose engine the image has and whose store outlives it."""
    settings = settings_of(process, tmp_path, monkeypatch)
    assert settings.engine.kind == ("embedded" if process.image == "kvshare" else "vllm")
    assert settings.store.path is not None
    assert Path(settings.store.path).is_relative_to("/var/lib/kvshare")
    assert settings.index.dense == (process.image == "kvshare"), "only the extra embeddings has an embedder"
    if process.settings is not None:
        assert settings.auth.keys_file is not None, "without keys the server is open to everyone"
    if process.image is not None:
        assert settings.server.host == "0.0.0.0"


def test_an_unknown_setting_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above rejects a variable of a setting that does not exist."""
    with pytest.raises(ConfigError, match=r"server\.prot"):
        settings_of(Process("wrong", ("serve",), {"KVSHARE_SERVER__PROT": "1"}), tmp_path, monkeypatch)


@pytest.mark.parametrize("process", SERVERS, ids=lambda each: each.name)
def test_a_stop_has_more_time_than_running_requests(
    process: Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What kills it waits longer than server.drain_s and the 20 s in which KV is written."""
    drain_s = settings_of(process, tmp_path, monkeypatch).server.drain_s
    if process.name.startswith("compose"):
        assert int(process.details["stop_grace_period"].removesuffix("s")) >= drain_s + 20
    elif process.name.startswith("kubernetes"):
        pod = pods()["kvshare"]["spec"]["template"]["spec"]
        assert pod["terminationGracePeriodSeconds"] >= drain_s + 20
    elif process.name.endswith(".service"):
        assert int(dict(unit(process.name))["TimeoutStopSec"]) >= drain_s + 20


@pytest.mark.parametrize("process", VLLMS, ids=lambda each: each.name)
def test_the_disk_of_vllm_is_larger_than_its_memory(process: Process) -> None:
    """And the control server, where others reach it, has the token that it asks for."""
    memory, disk = (parse_bytes(process.value_of(option)) for option in ("--kv-bytes", "--disk-bytes"))
    assert disk >= memory
    assert process.value_of("--disk").startswith("/var/lib/kvshare")
    if process.image is not None:
        assert process.value_of("--control-host") == "0.0.0.0"
        assert "KVSHARE_VLLM_TOKEN" in process.environment


@pytest.mark.parametrize("process", SERVERS, ids=lambda each: each.name)
def test_the_proxy_names_the_vllm_that_is_started_with_it(
    process: Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its replicas have the ports that vLLM and the connector listen on, and names that lead there."""
    settings = settings_of(process, tmp_path, monkeypatch)
    place = process.name.split()[0].removesuffix(".service")
    others = {each.name.split()[0].removesuffix("-vllm.service"): each for each in VLLMS}
    if place not in others or process.settings is None:
        return
    port = int(others[place].value_of("--port"))
    names = {"compose": ["vllm"], "kubernetes": [f"kvshare-vllm-{n}.kvshare-vllm" for n in range(2)]}
    expected = [
        (f"http://{name}:{port}", f"http://{name}:{port + 1}") for name in names.get(place, ["127.0.0.1"])
    ]
    assert [(each.url, each.control) for each in settings.vllm.replicas] == expected


@pytest.mark.parametrize("dockerfile", IMAGES.values())
def test_health_is_asked_at_a_route_that_exists(dockerfile: str) -> None:
    """The program of a HEALTHCHECK is Python, and its route is in the table, without a key."""
    check = next(rest for word, rest in instructions(dockerfile) if word == "HEALTHCHECK")
    _, _, program = yaml.safe_load(check.split("CMD ", 1)[1])
    ast.parse(program)
    (route,) = re.findall(r"(?<=[0-9'])/(ready|health)'", program)
    assert f"/{route}" in OPEN_ROUTES
    assert route == ("health" if dockerfile == "Dockerfile.vllm" else "ready")


@pytest.mark.parametrize("name", list(pods()))
def test_probes_ask_routes_that_exist(name: str) -> None:
    """Readiness of the proxy is /ready; a vLLM has /health alone, which the proxy asks, too."""
    (container,) = pods()[name]["spec"]["template"]["spec"]["containers"]
    probes = {key: value["httpGet"] for key, value in container.items() if key.endswith("Probe")}
    assert {"livenessProbe", "readinessProbe"} <= set(probes)
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    for probe in probes.values():
        assert probe["path"] in OPEN_ROUTES
        assert ports[probe["port"]] == (8080 if name == "kvshare" else 8000)
    assert probes["readinessProbe"]["path"] == ("/ready" if name == "kvshare" else "/health")


def test_published_ports_are_on_loopback() -> None:
    """TLS ends in a reverse proxy in front of them."""
    published = [port for each in compose()["services"].values() for port in each.get("ports", ())]
    assert len(published) == 3
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_no_secret_is_written_down() -> None:
    """Files of deploy/ refer to secrets, and none has one: no key, hash or Secret with values."""
    for path in (
        each for each in DEPLOY.rglob("*") if each.is_file() and not {"secrets", ".env"} & {*each.parts}
    ):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"kind: Secret\b|sha256: *[0-9a-f]|\bsk-\w|BEGIN [A-Z ]*KEY", text), path
        for name, value in re.findall(r"\b(\w*(?:TOKEN|API_KEY|PASSWORD))[:=] *([^,}\s]+)", text):
            assert value.startswith("${"), f"{path.name}: {name} has a value"
