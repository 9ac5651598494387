"""What a server has measured, and from which length on sharing pays, as `kvshare doctor` reports it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from kvshare.cli.running_checks import check_costs
from tests.kvshare.cli.conftest import Cli
from tests.kvshare.cli.costs import COSTS
from tests.kvshare.cli.fake_vllm import Fake, connector, vllm
from tests.kvshare.cli.findings import Start, nowhere

RATES = (
    "a full prefill of 1,024 tokens 30 ms, 8,192 tokens 222 ms, loads from memory 20.0 GB/s, a pass 5.0 ms, "
    "the lookup of 8,192 tokens 5.8 ms, their embedding 38 ms"
)
ALL = ["embedding", "load", "lookup", "pass", "prefill"]
LOADS = {**COSTS["loads"], "disk": {"fixed_s": 0.01, "bytes_per_s": 1.5e9}}


@pytest.mark.parametrize(
    ("changes", "of_costs", "of_break_even"),
    [
        ({}, "measured: prefill, load; assumed: pass, lookup, embedding (on a CPU)", "from 1,234 tokens on"),
        ({"measured": ALL}, "measured: prefill, pass, load, lookup, embedding (on a CPU)", "from 1,234"),
        ({"break_even_tokens": None}, "measured: prefill, load; assumed: pass", "a plan never pays"),
        ({"measured": ["prefill"]}, "measured: prefill; assumed: pass, load", "has not measured load"),
        ({"measured": [], "machine": ""}, "assumed: prefill, pass, load", "not measured load and prefill"),
        ({"loads": LOADS}, "loads from memory 20.0 GB/s, loads from disk 1.5 GB/s", "from 1,234"),
    ],
)
def test_costs_come_from_a_running_server(
    start: Start, changes: Mapping[str, Any], of_costs: str, of_break_even: str
) -> None:
    """What it has measured and what it assumes, in times of prompts; then from where on sharing pays."""
    server = start(Fake({"/admin/stats": (200, {"costs": {**COSTS, **changes}})}))
    costs, break_even, *of_disk = check_costs(server.url, None)
    assert [check.name for check in of_disk] == ["disk"] * ("loads" in changes)
    assert (costs.name, break_even.name) == ("costs", "break-even")
    assert of_costs in costs.detail
    assert costs.detail.startswith(RATES) or "loads" in changes
    assert of_break_even in break_even.detail
    assert (break_even.state == "warn") == ("break_even_tokens" in changes)
    assert server.url in costs.detail
    assert server.url in break_even.detail


@pytest.mark.parametrize(
    ("bytes_per_s", "said"),
    [(1e12, "from 256 tokens on"), (6e9, "from 32,768 tokens on"), (1e8, "more slowly")],
)
def test_whether_kv_on_disk_pays(start: Start, bytes_per_s: float, said: str) -> None:
    """By its measured rate, and what computing takes: 147,456 bytes in 20 us, later tokens in more."""
    loads = {**COSTS["loads"], "disk": {"fixed_s": 0.01, "bytes_per_s": bytes_per_s}}
    server = start(Fake({"/admin/stats": (200, {"costs": {**COSTS, "loads": loads}})}))
    _, _, disk = check_costs(server.url, None)
    assert said in disk.detail
    assert (disk.state == "warn") == (bytes_per_s == 1e8)


@pytest.mark.parametrize(
    "costs", [{}, [], None, {"measured": []}, {**COSTS, "full_s": 1}, {**COSTS, "loads": {"m": 1}}]
)
def test_a_server_of_another_version_has_no_costs(start: Start, costs: object) -> None:
    """Which is no failure."""
    (check,) = check_costs(start(Fake({"/admin/stats": (200, {"costs": costs})})).url, None)
    assert (check.name, check.state) == ("break-even", "ok")
    assert "is that a KVShare server of this version" in check.detail


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
