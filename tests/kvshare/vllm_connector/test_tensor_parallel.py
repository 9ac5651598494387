"""
Two ranks, on the CPU wheel: the answers are one rank's, both hold the same segments, and a rank that fails
hangs nobody, wherever it fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.kvshare.vllm_connector.starts import WITH_LITTLE_ROOM

if TYPE_CHECKING:
    from tests.kvshare.vllm_connector.in_process_vllm import Checkpoint, Vllm

ROOT = Path(__file__).parents[3]
LIMIT = 1e-4
TIME_S = {"eager": 900, "compiled": 900}  # a hang takes as long as it is given


@dataclass(frozen=True)
class Outcome:
    """What a scenario said on its way, and what it logged."""

    said: dict[str, list[Any]]
    log: str


def run(model: Path, folder: Path, mode: str = "eager", fault: str = "") -> Outcome:
    """Raises TimeoutExpired where it hangs."""
    faults = folder / "faults"
    faults.write_text(fault)
    done = subprocess.run(
        [sys.executable, "-m", "tests.kvshare.vllm_connector.tensor_parallel", str(model), mode],
        cwd=ROOT,
        env={
            **os.environ,
            "KVSHARE_FAULTS": str(faults),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=TIME_S[mode],
        check=False,
    )
    said: dict[str, list[Any]] = defaultdict(list)
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            for what, found in json.loads(line).items():
                said[what].append(found)
    return Outcome(said, done.stdout + done.stderr)


@pytest.fixture(scope="session")
def outcome(checkpoint: Checkpoint, mode: str, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """All that can be tried with one start; of the session, as tests of a vLLM are beside those of others."""
    return run(checkpoint("llama"), tmp_path_factory.mktemp("ranks"), mode)


def test_planned_requests_are_answered_as_in_full(outcome: Outcome) -> None:
    assert outcome.said["refusals"] == [[]], outcome.log[-3000:]
    assert len(outcome.said["parity"]) == 3
    for distance, decision in outcome.said["parity"]:
        assert distance <= LIMIT
        assert decision == "approx"


@WITH_LITTLE_ROOM
def test_the_same_repairs_are_chosen_as_on_one_rank(outcome: Outcome, vllm: Vllm) -> None:
    """Each rank has half of the heads; scores are summed before the choice."""
    from tests.kvshare.vllm_connector.in_process_vllm import random_text
    from tests.kvshare.vllm_connector.tensor_parallel import ask_chosen

    tokens = random_text(600, 1)
    alone = ask_chosen(vllm, vllm.store(tokens), tokens)
    (ranks,) = outcome.said["chosen"]
    assert ranks["repaired"] == [list(span) for span in alone["repaired"]]
    assert alone["repaired"]
    both = {int(token): value for token, value in ranks["logprobs"].items()}
    assert (
        max(abs(both[token] - value) for token, value in alone["logprobs"].items() if token in both) <= LIMIT
    )


@WITH_LITTLE_ROOM
def test_what_is_stored_does_not_depend_on_the_number_of_ranks(outcome: Outcome, vllm: Vllm) -> None:
    """Both see whole heads in one memory, which are those of a single rank."""
    from tests.kvshare.vllm_connector.in_process_vllm import random_text
    from tests.kvshare.vllm_connector.tensor_parallel import first_segment

    store, segment_id = vllm.worker.attached.store, first_segment(vllm, random_text(600, 1))
    (alone,) = (stored.rows[:, 0, 0, 0].flatten().tolist() for stored in store.find([segment_id]).values())
    ((first, second),) = outcome.said["whole"]
    assert first == second == pytest.approx(alone, abs=LIMIT)
    assert len(alone) > 0
    assert all(any(part) for part in (first[: len(first) // 2], first[len(first) // 2 :]))


def test_aborts_leave_nothing_behind(outcome: Outcome) -> None:
    assert [steps for steps, _ in outcome.said["aborted"]] == [0, 1, 3]


@pytest.mark.long
def test_layers_of_several_shapes_are_shared_on_two_ranks(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Gemma 4, of which the full layers have one KV head, on both ranks."""
    test_planned_requests_are_answered_as_in_full(run(checkpoint("gemma4"), tmp_path))


@pytest.mark.parametrize(
    ("stage", "decision", "reason"),
    [("verify", "full", "load_failed"), ("write", "full", "load_failed"), ("save", "approx", "save_failed")],
)
def test_what_fails_on_one_rank_fails_on_both(
    outcome: Outcome, stage: str, decision: str, reason: str
) -> None:
    """And the answer is right all the same."""
    (found,) = outcome.said[stage]
    distance, *rest, num_stored = found
    assert distance <= LIMIT
    assert rest == [decision, reason]
    assert bool(num_stored) == (stage != "save")


def test_evictions_take_the_same_segments_on_both(outcome: Outcome) -> None:
    assert max(outcome.said["evicting"]) <= LIMIT
    assert outcome.said["dropped"][0] >= 3
    ((index, *ranks),) = outcome.said["held"]
    assert sorted(index) == ranks[0] == ranks[1]


def test_a_rank_that_fails_in_a_pass_takes_vllm_with_it(outcome: Outcome) -> None:
    """One clear line, and no hang: the other rank waits in a collective for ever."""
    assert outcome.said["pass"] == ["RuntimeError"]  # vLLM's engine in its own process: EngineDeadError
    lines = [line for line in outcome.log.splitlines() if "kvshare: rank 1 failed in" in line]
    assert len(lines) == 1
    assert "a pass over placeholders" in lines[0]


@pytest.mark.long
def test_a_rank_that_cannot_be_prepared_is_served_unshared(checkpoint: Checkpoint, tmp_path: Path) -> None:
    found = run(checkpoint("llama"), tmp_path, fault="1:prepare")
    (refusals,) = found.said["refusals"]
    assert any("RuntimeError" in reason for reason in refusals), refusals
    assert found.said["unshared"] == [4]


@pytest.mark.long
def test_a_rank_that_fails_in_the_self_test_ends_the_start(checkpoint: Checkpoint, tmp_path: Path) -> None:
    found = run(checkpoint("llama"), tmp_path, fault="1:self-test")
    assert not found.said
    assert found.log.count("kvshare: rank 1 failed in the self-test") == 1
