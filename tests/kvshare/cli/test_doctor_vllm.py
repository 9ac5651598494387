"""What `kvshare doctor --vllm-url` finds in a vLLM that is fine, and in ones that are not."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from kvshare.cli.doctor import run_checks, run_vllm_checks
from kvshare.cli.server_checks import check_vllm
from kvshare.vllm_protocol.messages import PROTOCOL
from kvshare.vllm_protocol.places import DiskProblem
from tests.kvshare.cli.conftest import Cli
from tests.kvshare.cli.fake_vllm import INFO, Fake, Route, connector, vllm
from tests.kvshare.cli.findings import Start, nowhere

KEY = "a-key"
Found = dict[str, tuple[str, str]]


def found(vllm_url: str, control_url: str) -> Found:
    """State and text of each finding by name; the worst one where several have the same name."""
    worst = {"ok": 0, "warn": 1, "fail": 2}
    findings: Found = {}
    for check in run_vllm_checks(vllm_url, control_url):
        if worst[check.state] >= worst[findings.get(check.name, ("ok", ""))[0]]:
            findings[check.name] = (check.state, f"{check.detail} -> {check.remedy}")
    return findings


def states(findings: Found) -> Mapping[str, str]:
    """The findings that are not fine."""
    return {name: state for name, (state, _) in findings.items() if state != "ok"}


def test_a_vllm_that_is_fine(start: Start) -> None:
    """Each question is answered once and with ok, and the memory is told."""
    server = start(vllm())
    findings = found(server.url, start(connector()).url)
    assert states(findings) == {}
    assert list(findings) == [
        "vllm", "version", "models", "render", "control", "sharing", "kvshare", "memory",
        "policy", "prefixes", "settings", "details",
    ]  # fmt: skip
    assert "1.00 of 4.00 GiB of KV in 1,234 segments" in findings["memory"][1]
    assert "CPU_ATTN" in findings["settings"][1]
    assert server.bodies == [{"model": "served", "prompt": "a", "max_tokens": 1}] * 2


@pytest.mark.parametrize("status", [403, 404])
def test_a_vllm_without_render_routes(start: Start, status: int) -> None:
    """Stock vLLM, or one that knows no such routes: chats are shared; a warning has the remedy."""
    off = (status, {"error": {"message": "Scale-out endpoints are disabled."}})
    findings = found(start(vllm(render=off)).url, start(connector()).url)
    assert states(findings) == {"render": "warn"}
    assert "/v1/messages are not shared" in findings["render"][1]
    assert "--enable-scale-out" in findings["render"][1]


def test_a_vllm_whose_render_routes_fail(start: Start) -> None:
    """Its log says why."""
    broken = (500, {"error": {"message": "no template"}})
    findings = found(start(vllm(render=broken)).url, start(connector()).url)
    assert states(findings) == {"render": "warn"}
    assert "no template -> see the log" in findings["render"][1]


def test_the_command_ends_with_its_findings(start: Start, cli: Cli) -> None:
    """`kvshare doctor --vllm-url` is exit code 0 when all is fine, and 1 when something failed."""
    url, control = start(vllm()).url, start(connector()).url
    fine = cli("doctor", "--vllm-url", url, "--vllm-control-url", control, "--format", "json")
    assert (fine.code, fine.document["ok"]) == (0, True)
    broken = cli("doctor", "--vllm-url", url, "--vllm-control-url", nowhere())
    assert broken.code == 1
    assert "fail  control" in broken.stdout


def test_the_command_refuses_what_is_no_address(cli: Cli) -> None:
    """Addresses are http or https, and the control server's is no use alone."""
    for arguments in (["--vllm-url", "localhost:8000"], ["--vllm-control-url", "http://127.0.0.1:1"]):
        assert cli("doctor", *arguments).code == 2


def test_the_control_server_is_one_port_further() -> None:
    """Where it is not told, it is looked for where `kvshare vllm` puts it, be there such a port or not."""
    by_name = {check.name: check for check in run_vllm_checks("http://127.0.0.1:65535", None)}
    assert by_name["control"].state == "fail"
    assert "http://127.0.0.1:65536" in by_name["control"].detail


def test_the_replicas_of_the_settings_are_checked(start: Start, tmp_path: Path) -> None:
    """With engine.kind vllm the config's replicas are looked at, and no model of this process."""
    config = tmp_path / "kvshare.yaml"
    replicas = [{"url": start(vllm()).url, "control_url": start(connector()).url}, {"url": nowhere()}]
    settings: dict[str, Any] = {"engine": {"kind": "vllm"}, "vllm": {"replicas": replicas}}
    settings["store"] = {"path": str(tmp_path / "store")}
    config.write_text(yaml.safe_dump(settings))
    checks = run_checks(config)
    assert [check.state for check in checks if check.name == "vllm"] == ["ok", "fail"]
    names = {check.name for check in checks}
    assert {"store", "index", "embedder", "port", "torch"} <= names
    assert not {"model", "tokenizer", "geometry"} & names
    config.write_text(yaml.safe_dump({**settings, "vllm": {}}))
    assert [check.state for check in run_checks(config) if check.name == "vllm"] == ["fail"]


def test_ranks_are_looked_at_each(start: Start) -> None:
    """Each rank's connector is asked; ranks that nobody would send to are a warning."""
    url, rank = start(vllm()).url, replace(INFO, data_parallel_rank=0, data_parallel_size=2)
    control = start(connector(rank)).url
    findings = found(url, control)
    assert states(findings) == {"ranks": "warn"}
    assert "--vllm-data-parallel-size 2" in findings["ranks"][1]
    checks = check_vllm(url, [control, start(connector(replace(rank, data_parallel_rank=1))).url])
    assert {check.state for check in checks} == {"ok"}
    names = [check.name for check in checks]
    assert (names.count("control"), names.count("memory"), names.count("ranks")) == (2, 2, 1)
    silent = [check.state for check in check_vllm(url, [control, nowhere()]) if check.name == "control"]
    assert silent == ["ok", "fail"]


def test_nobody_answers() -> None:
    """Without a vLLM both halves fail, each saying how to start it."""
    findings = found(nowhere(), nowhere())
    assert states(findings) == {"vllm": "fail", "control": "fail"}
    assert "kvshare vllm MODEL" in findings["vllm"][1]


def test_a_dead_engine(start: Start) -> None:
    """A vLLM whose engine has died answers 503 and fails."""
    findings = found(start(vllm(health=(503, None))).url, start(connector()).url)
    assert states(findings) == {"vllm": "fail"}


def test_something_that_is_no_vllm(start: Start) -> None:
    """A server without vLLM's routes fails without a traceback."""
    other = start(Fake({"/health": (200, {"status": "ok"})}))
    assert states(found(other.url, other.url)) == {"version": "fail", "models": "fail", "control": "fail"}


def test_a_kvshare_server_in_place_of_a_vllm(start: Start) -> None:
    """It is recognised by its name, on either address, with what to give instead."""
    ours = start(Fake({"/health": (200, {"status": "ok"})}, name="kvshare"))
    findings = found(ours.url, ours.url)
    assert states(findings) == {"vllm": "fail", "control": "fail"}
    assert "is a KVShare server" in findings["vllm"][1]
    assert "a KVShare server answers" in findings["control"][1]


def test_an_untested_version(start: Start) -> None:
    """A version outside the range is a warning with the range."""
    findings = found(start(vllm(version=(200, {"version": "0.40.1"}))).url, start(connector()).url)
    assert states(findings) == {"version": "warn"}
    assert ">=0.32,<0.33" in findings["version"][1]


def test_a_version_that_was_only_read(start: Start) -> None:
    """It may be used, and it is said that nobody has run it."""
    findings = found(start(vllm(version=(200, {"version": "0.33.0"}))).url, start(connector()).url)
    assert states(findings) == {"version": "warn"}
    assert "vLLM 0.33.0: read, not run" in findings["version"][1]


def test_a_locked_vllm(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own key comes from the environment; without it the models are not told."""
    monkeypatch.delenv("KVSHARE_VLLM_API_KEY", raising=False)
    locked = vllm()
    locked.key = KEY
    url, control = start(locked).url, start(connector()).url
    findings = found(url, control)
    assert states(findings) == {"models": "fail"}
    assert "KVSHARE_VLLM_API_KEY" in findings["models"][1]
    monkeypatch.setenv("KVSHARE_VLLM_API_KEY", KEY)
    assert states(found(url, control)) == {}


def test_a_vllm_without_the_connector(start: Start) -> None:
    """Started with plain `vllm serve` there is no control server, and that is said."""
    findings = found(start(vllm()).url, nowhere())
    assert states(findings) == {"control": "fail"}
    assert "kvshare vllm MODEL" in findings["control"][1]


def test_a_locked_connector(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connector with a token is asked with the one of the environment."""
    control = connector()
    control.key = KEY
    url, control_url = start(vllm()).url, start(control).url
    monkeypatch.delenv("KVSHARE_VLLM_TOKEN", raising=False)
    findings = found(url, control_url)
    assert states(findings) == {"control": "fail"}
    assert "KVSHARE_VLLM_TOKEN" in findings["control"][1]
    monkeypatch.setenv("KVSHARE_VLLM_TOKEN", KEY)
    assert states(found(url, control_url)) == {}


def test_another_protocol(start: Start) -> None:
    """A connector of another protocol is told as that, and nothing of it is read."""
    findings = found(start(vllm()).url, start(connector(protocol=PROTOCOL + 1)).url)
    assert states(findings) == {"protocol": "fail"}
    assert f"expected {PROTOCOL}" in findings["protocol"][1]


def test_the_connector_of_another_vllm(start: Start) -> None:
    """A connector whose model this vLLM does not serve is a warning."""
    findings = found(start(vllm()).url, start(connector(replace(INFO, model="other/model"))).url)
    assert states(findings) == {"model": "warn"}


def test_refusals_and_warnings_are_told_each(start: Start) -> None:
    """Every refusal is a failure of its own, every warning a warning."""
    info = replace(INFO, refusals=("sliding windows", "two pipeline stages"), warnings=("slow", "odd"))
    checks = run_vllm_checks(start(vllm()).url, start(connector(info)).url)
    told = [(check.state, check.detail) for check in checks if check.name in ("sharing", "connector")]
    assert told == [
        ("fail", "sliding windows"),
        ("fail", "two pipeline stages"),
        ("warn", "slow"),
        ("warn", "odd"),
    ]


def test_a_disk_that_is_not_written_is_a_warning(start: Start) -> None:
    """With the reason, and what to do."""
    info = replace(INFO, disk_problem=DiskProblem("No space left on device"))
    checks = run_vllm_checks(start(vllm()).url, start(connector(info)).url)
    (check,) = [each for each in checks if each.name == "connector"]
    assert (check.state, check.detail) == ("warn", "KV is not written to its disk: No space left on device")
    assert check.remedy
    assert "--disk" in check.remedy


def test_requests_that_pass_unshared_are_no_failure(start: Start) -> None:
    """vLLM serves them, and the method of speculative decoding was the operator's choice."""
    info = replace(INFO, speculation="eagle3", passing="speculative decoding by eagle3")
    checks = run_vllm_checks(start(vllm()).url, start(connector(info)).url)
    told = [(check.state, check.detail) for check in checks if check.name == "sharing"]
    assert told == [("warn", "speculative decoding by eagle3")]


WRONG: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({"can_move_keys": False}, {"sharing": "warn"}),
    ({"versions": {"kvshare": "0.0.1"}}, {"kvshare": "warn"}),
    ({"max_bytes": 1024}, {"memory": "warn"}),
    ({"settings": {"kv_load_failure_policy": "fail"}}, {"policy": "fail"}),
    ({"settings": {"prefix_caching": False}}, {"prefixes": "warn"}),
    ({"settings": {"prompt_tokens_details": False}}, {"details": "warn"}),
    ({"settings": {}}, {}),
]


@pytest.mark.parametrize(("changes", "expected"), WRONG)
def test_settings_that_are_not_as_meant(
    start: Start, changes: Mapping[str, Any], expected: Mapping[str, str]
) -> None:
    """Each wrong setting is told with its weight; one that is not told is not judged."""
    assert states(found(start(vllm()).url, start(connector(**changes)).url)) == expected


@pytest.mark.parametrize("answer", [(200, {"usage": {"prompt_tokens": 1}}), (200, {}), (500, None)])
def test_cached_tokens_that_are_not_told(start: Start, answer: Route) -> None:
    """Where the connector cannot know it, a completion of one token shows whether cached tokens are told."""
    findings = found(start(vllm(completions=answer)).url, start(connector()).url)
    assert states(findings) == {"details": "warn"}


@pytest.mark.parametrize("installed", [True, False])
def test_a_proxy_without_xgrammar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    """Is told that formats of answers are tried with one library only."""
    module = ModuleType("xgrammar")
    module.__spec__ = ModuleSpec("xgrammar", None)
    monkeypatch.setitem(sys.modules, "xgrammar", module if installed else None)  # None: it is not found
    config = tmp_path / "kvshare.yaml"
    config.write_text(f"engine: {{kind: vllm}}\nstore: {{path: {tmp_path / 'store'}}}\n")
    (check,) = [check for check in run_checks(config) if check.name == "formats"]
    assert check.state == ("ok" if installed else "warn")
    assert ("pip install xgrammar" in check.remedy) is not installed
