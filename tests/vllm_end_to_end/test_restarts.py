"""A vLLM and the proxy are killed and started again: what the disk has is found, all answers are right."""

import os
import signal

from kvshare_lab.vllm.servers import START_S, Server
from tests.vllm_end_to_end.fleet import (
    Fleet,
    ask,
    donate,
    log_of,
    pair,
    replica_info,
    rested,
    wait_connected,
    wait_until,
)


def num_held(replica: Server) -> int:
    return int(replica_info(replica)["num_segments"])


def wait_written(fleet: Fleet, replica: Server) -> None:
    """Until its connector reports that all it holds is on disk; it does so in a step of vLLM."""

    def is_written() -> bool:
        info = replica_info(replica)
        if info["num_disk_segments"] >= info["num_segments"]:
            return True
        with fleet.client("bob", replica.url) as direct:
            ask(direct, [{"role": "user", "content": "hi"}])
        return False

    wait_until(is_written, lambda: replica_info(replica))


def test_after_a_kill_near_duplicates_are_served_from_disk(fleet: Fleet) -> None:
    """
    Of what was on disk nothing is computed again but edits; a prompt that came just before the kill is
    answered, too, whether it was written or not.
    """
    pairs, last = [pair(60 + seed) for seed in range(4)], [pair(64 + seed) for seed in range(2)]
    with fleet.client("ann") as ann:
        for forms in pairs:
            donate(fleet, ann, forms.donor_messages)
        rested(fleet)
        replica = max(fleet.replicas, key=num_held)  # similar prompts go to the same one
        num_before = num_held(replica)
        assert num_before > len(pairs)
        wait_written(fleet, replica)
        for forms in last:
            ask(ann, forms.donor_messages)
    killed = (replica, fleet.proxy)
    for server in killed:
        os.killpg(server.session_id, signal.SIGKILL)
    for server in killed:
        server.stop()
        server.start()
    for server in killed:
        server.wait_ready(START_S)
    wait_connected(fleet.proxy, fleet.replicas)
    assert f"replica {replica.url[7:]} still holds" in log_of(fleet.proxy), fleet.why()
    with fleet.client("ann") as ann:
        for forms in last:
            assert ask(ann, forms.recipient_messages)[0] == forms.answer, fleet.why()
        for forms in pairs:
            answer, num_tokens, num_cached = ask(ann, forms.recipient_messages)
            assert answer == forms.answer, fleet.why()
            assert num_cached > 0.3 * num_tokens, fleet.why()
    assert replica_info(replica)["num_bytes"] > 0, "what was read is in memory"
