"""Two replicas as one service: where a request goes, what `kvshare doctor` says, and a lost one."""

import os
import subprocess
import sys

from tests.vllm_end_to_end.fleet import Fleet, ask, donate, pair


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
