"""The prompt length from which sharing pays, as `kvshare doctor` reports it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from kvshare.cli.server_checks import check_break_even
from tests.kvshare.cli.conftest import Cli
from tests.kvshare.cli.fake_vllm import Fake, connector, vllm
from tests.kvshare.cli.findings import Start, nowhere

COSTS = {
    "break_even_tokens": 1234,
    "measured": ["load", "prefill"],
    "prefill_tokens_per_s": 30000.0,
    "load_bytes_per_s": 2e10,
    "pass_s": 0.005,
}


@pytest.mark.parametrize(
    ("costs", "state", "words"),
    [
        (COSTS, "ok", ("from 1,234 tokens on", "prefill 30,000 tokens/s", "load 20.0 GB/s", "5.0 ms a pass")),
        ({**COSTS, "break_even_tokens": None}, "warn", ("never pays", "20.0 GB/s")),
        ({**COSTS, "measured": ["prefill"]}, "ok", ("unknown", "has not measured load")),
        ({**COSTS, "measured": []}, "ok", ("unknown", "load and prefill")),
        ({}, "ok", ("unknown", "is that a KVShare server")),
    ],
)
def test_the_break_even_length_comes_from_a_running_server(
    start: Start, costs: Mapping[str, Any], state: str, words: Sequence[str]
) -> None:
    """What it has measured, with its rates; what it has not is unknown."""
    server = start(Fake({"/admin/stats": (200, {"costs": costs})}))
    check = check_break_even(server.url, None)
    assert (check.name, check.state) == ("break-even", state)
    assert all(word in check.detail for word in words), check.detail
    if "unknown" not in words:
        assert server.url in check.detail


def test_without_a_server_the_break_even_length_is_unknown(cli: Cli, start: Start) -> None:
    """Which is no failure: the command ends as the other checks say."""
    options = (
        "--vllm-url",
        start(vllm()).url,
        "--vllm-control-url",
        start(connector()).url,
        "--format",
        "json",
    )
    for server in (nowhere(), start(Fake({"/admin/stats": (401, {"error": {"message": "who?"}})})).url):
        outcome = cli("doctor", *options, "--url", server)
        assert outcome.code == 0
        (check,) = (check for check in outcome.document["checks"] if check["name"] == "break-even")
        assert "unknown" in check["detail"]
        assert "--url" in check["remedy"]
    assert cli("doctor", *options, "--url", "localhost").code == 2
