"""Two replicas as one service: where a request goes, what `kvshare doctor` says, and a lost one."""

import os
import subprocess
import sys
import time

from kvshare.cli.client import AdminClient
from kvshare_lab.vllm.servers import Server
from tests.conftest import Server as EmbeddedServer
from tests.vllm_end_to_end.fleet import Fleet, ask, donate, log_tail, pair, replica_info


def test_a_request_goes_where_its_donor_is(fleet: Fleet) -> None:
    """Each replica has its own prompts; every near-duplicate finds the one that has its donor."""
    pairs = [pair(20 + seed) for seed in range(4)]
    with fleet.client("ann") as ann:
        for forms in pairs:
            donate(fleet, ann, forms.donor_messages)
        for forms in pairs:
            answer, num_tokens, num_cached = ask(ann, forms.recipient_messages)
            assert answer == forms.answer
            assert num_cached > 0.3 * num_tokens  # a model that nobody measured: much is repaired
    served = [
        value for name, value in fleet.counters().items() if name.startswith("kvshare_replica_segments")
    ]
    assert len(served) == 2
    assert all(served)


def num_segments(fleet: Fleet) -> int:
    """That the proxy's prompts point to."""
    stats = AdminClient(fleet.proxy.url, key=EmbeddedServer.key("root")).stats()
    return int(stats["totals"]["num_segments"])


def num_held(replica: Server) -> int:
    """By a connector."""
    return int(replica_info(replica)["num_segments"])


def test_costs_are_measured_before_clients_teach_them(fleet: Fleet) -> None:
    """By requests of the proxy's own: prefills, loads and passes. Nothing of them is stored."""
    deadline = time.monotonic() + 90
    while "requests of our own" not in log_tail(fleet.proxy, 10**6):
        assert time.monotonic() < deadline, log_tail(fleet.proxy)
        time.sleep(0.2)
    costs = AdminClient(fleet.proxy.url, key=EmbeddedServer.key("root")).stats()["costs"]
    assert {"prefill", "load", "pass"} <= set(costs["measured"])
    assert costs["machine"]
    assert 0 < costs["full_s"]["1024"] < costs["full_s"]["8192"]
    while (known := num_segments(fleet)) != (held := sum(map(num_held, fleet.replicas))):
        assert time.monotonic() < deadline, f"the proxy knows {known} segments, the replicas hold {held}"
        time.sleep(0.2)


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
        timeout=60,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr


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
