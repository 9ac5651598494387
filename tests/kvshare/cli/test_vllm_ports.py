"""The ports that `kvshare vllm` takes: which they are, and those that it refuses."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from kvshare_lab.vllm.ports import free_ports
from tests.kvshare.cli.commands_of_vllm import extra
from tests.kvshare.cli.installation import EXIT_STATUS, Installation


def test_ranks_need_ports(installed: Installation) -> None:
    """There must be a control port for the last one."""
    outcome = installed.run("some/model", "-dp", "3", "--control-port", "65534")
    assert outcome.code == 2
    assert "--control-port" in outcome.stderr


def test_the_port_of_a_config_file_counts(installed: Installation, tmp_path: Path) -> None:
    """vLLM's --config file may hold the port; the command line comes first."""
    config = tmp_path / "vllm.yaml"
    config.write_text("port: 9100\n")
    assert extra(installed.printed("--config", config))["control_port"] == 9101
    words = installed.printed("some/model", "--config", config, "--port=9200")
    assert extra(words)["control_port"] == 9201


def test_an_open_control_server_needs_a_token(installed: Installation) -> None:
    """Beyond loopback the connector is not started without a secret."""
    outcome = installed.run("some/model", "--control-host", "0.0.0.0")
    assert outcome.code == 2
    assert "KVSHARE_VLLM_TOKEN" in outcome.stderr
    words = installed.printed("some/model", "--control-host", "0.0.0.0", KVSHARE_VLLM_TOKEN="secret")
    assert extra(words)["control_host"] == "0.0.0.0"
    assert "secret" not in " ".join(words)
    for loopback in ("localhost", "::1", "127.0.0.2"):
        assert installed.run("some/model", "--control-host", loopback).code == EXIT_STATUS


@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_a_taken_port_is_told_before_vllm_starts(installed: Installation, offset: int) -> None:
    """vLLM's own, the connector's, and that of another rank's: with the option and what to do."""
    (port,) = free_ports(1)
    with socket.create_server(("127.0.0.1", port)):
        own = {"--port": port - offset - 1, "--data-parallel-size": 2}  # control ports follow
        outcome = installed.run("some/model", *(word for pair in own.items() for word in pair))
    assert (outcome.code, outcome.stdout) == (1, "")
    option = "vLLM's --port" if offset == -1 else "--control-port"
    assert f"kvshare: {option}" in outcome.stderr
    assert f":{port}: address already in use; stop what listens there, or give another" in outcome.stderr


def test_vllm_and_the_connector_need_two_ports(installed: Installation) -> None:
    outcome = installed.run("some/model", "--port", 9000, "--control-port", 9000)
    assert outcome.code == 2
    assert "vLLM's own --port" in outcome.stderr


@pytest.mark.parametrize("port", ["0", "65535", "http"])
def test_a_port_without_a_next_one(installed: Installation, port: str) -> None:
    """Where the control port cannot be derived it must be given."""
    outcome = installed.run("some/model", "--port", port)
    assert outcome.code == 2
    assert "--control-port" in outcome.stderr
    assert extra(installed.printed("some/model", "--port", port, "--control-port", 99))["control_port"] == 99
