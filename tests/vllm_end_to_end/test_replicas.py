"""Two replicas as one service: where a request goes, what `kvshare doctor` says, and a lost one."""

import os
import subprocess
import sys
from pathlib import Path

from kvshare.cli.client import AdminClient
from kvshare_lab.vllm.servers import START_S, running
from tests.conftest import Server as EmbeddedServer
from tests.vllm_end_to_end.fleet import (
    WAIT_S,
    Fleet,
    ask,
    donate,
    log_of,
    log_tail,
    pair,
    proxy_with_keys,
    replica_info,
    rested,
    wait_connected,
    wait_until,
)


def test_a_request_goes_where_its_donor_is(fleet: Fleet) -> None:
    """Each replica has its own prompts; every near-duplicate finds the one that has its donor."""
    # Each with a salt of its own: forms are near-duplicates of each other, and would go to one replica.
    pairs = {f"form {seed}": pair(20 + seed) for seed in range(4)}
    with fleet.client("ann") as ann:
        for salt, forms in pairs.items():
            donate(fleet, ann, forms.donor_messages, cache_salt=salt)
        for salt, forms in pairs.items():
            answer, num_tokens, num_cached = ask(ann, forms.recipient_messages, cache_salt=salt)
            assert answer == forms.answer, fleet.why()
            assert num_cached > 0.3 * num_tokens, fleet.why()  # much is repaired: nobody measured the model
    served = [
        value for name, value in fleet.counters().items() if name.startswith("kvshare_replica_segments")
    ]
    assert len(served) == 2
    assert all(served)


def num_held(fleet: Fleet) -> int:
    """Segments of the connectors."""
    return sum(int(replica_info(replica)["num_segments"]) for replica in fleet.replicas)


def test_doctor_finds_nothing_wrong(fleet: Fleet) -> None:
    replica = fleet.replicas[0]
    found = subprocess.run(
        [
            *(sys.executable, "-m", "kvshare.cli.main", "doctor"),
            *("--vllm-url", replica.url, "--vllm-control-url", str(replica.control_url)),
        ],
        env={**os.environ, "KVSHARE_VLLM_TOKEN": replica.environment["KVSHARE_VLLM_TOKEN"]},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr


def test_costs_are_measured_before_clients_teach_them(fleet: Fleet, tmp_path: Path) -> None:
    """By requests of the proxy's own: prefills, loads and passes. Nothing of them is stored."""
    rested(fleet)
    before, token = num_held(fleet), fleet.replicas[0].environment["KVSHARE_VLLM_TOKEN"]
    fleet.proxy.stop()  # it does not measure, see ALWAYS
    try:
        measuring = proxy_with_keys(fleet.replicas, tmp_path, token, cost={})
        with running([measuring]):
            wait_until(lambda: "requests of our own" in log_of(measuring), lambda: log_tail(measuring))
            stats = AdminClient(measuring.url, key=EmbeddedServer.key("root")).stats()
            assert stats["totals"]["num_segments"] == 0, "of prompts"
            # It drops what it measured with, and some time later what it knows no prompt of.
            wait_until(lambda: num_held(fleet) <= before, lambda: f"{num_held(fleet)} held, {before} before")
    finally:
        fleet.proxy.start()
        fleet.proxy.wait_ready(START_S)
        wait_connected(fleet.proxy, fleet.replicas)
    costs = stats["costs"]
    assert {"prefill", "load", "pass"} <= set(costs["measured"])
    assert costs["machine"]
    assert 0 < costs["full_s"]["1024"] < costs["full_s"]["8192"]


def test_a_lost_replica_takes_its_prompts_with_it(fleet: Fleet) -> None:
    """The other one goes on serving; what only the lost one had is computed. Runs last: one is killed."""
    forms = pair(40)
    with fleet.client("ann") as ann:
        donate(fleet, ann, forms.donor_messages)
        fleet.replicas[0].stop()
        for seed in range(41, 45):
            other = pair(seed)
            assert ask(ann, other.recipient_messages)[0] == other.answer
        assert ask(ann, forms.recipient_messages)[0] == forms.answer
