"""
A replay decides what the servers decide: they answer a stream, which is then replayed with their answers.

`lab/scripts/same_as_served.py` does the same with longer streams and other logs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvshare_lab.vllm.servers import Server
from tests.kvshare.replay import sample_logs
from tests.kvshare.replay.served import Comparison, compared, stream
from tests.kvshare.replay.served_by_vllm import vllm_server
from tests.kvshare.replay.stage import MAX_TOKENS, Stage
from tests.kvshare.replay.synthetic import FakeEmbedder

CAPACITY_TOKENS = 5_880  # some ten prompts of the longest
MAX_PROMPT_TOKENS = 700
LOGS = ("wildchat", "sharegpt", "rag", "agent")


async def compare(
    folder: Path,
    *,
    num_requests: int,
    vllm: Server | None = None,
    logs: tuple[str, ...] = LOGS,
    by_embedding: bool = False,
    repair_rule: str = "windows",
    max_risk: float = 0.02,
) -> dict[str, Comparison]:
    paths = [sample_logs.write(name, folder, num_requests=num_requests // len(logs)) for name in logs]
    requests = stream(paths, num_requests=num_requests, max_tokens=MAX_PROMPT_TOKENS)
    assert len(requests) == num_requests
    # Too short to be looked up; with its answer, long enough to be stored.
    short = requests[num_requests // 2].token_ids[: 33 - MAX_TOKENS]
    requests[num_requests // 2] = replace(requests[num_requests // 2], token_ids=short)
    embedder = FakeEmbedder() if by_embedding else None
    stage = Stage(folder, CAPACITY_TOKENS, embedder, repair_rule, max_risk)
    return await compared(stage, requests, vllm=vllm)


def check(comparison: Comparison, *, at_least: int) -> None:
    """Equal request by request, with enough that could differ."""
    decisions = comparison.served.decisions
    assert comparison.replayed == decisions
    assert decisions[len(decisions) // 2].decision == "full"
    assert sum(one.decision == "approx" for one in decisions) >= at_least
    assert sum(len(one.evicted) for one in decisions) >= at_least


@pytest.mark.slow
@pytest.mark.parametrize("num_requests", [120, pytest.param(300, marks=pytest.mark.long)])
@pytest.mark.parametrize("by_embedding", [False, True], ids=["tokens", "embedding"])
async def test_a_replay_decides_what_the_embedded_engine_decides(
    by_embedding: bool, num_requests: int, tmp_path: Path
) -> None:
    """Decision, exact, copied, repaired and computed tokens, and evictions."""
    found = await compare(tmp_path, num_requests=num_requests, by_embedding=by_embedding)
    check(found["embedded"], at_least=num_requests // 3)
    assert found["embedded"].num_embedded >= num_requests // 6 * by_embedding


@pytest.mark.slow
async def test_the_same_with_forms_and_sliding_windows(tmp_path: Path) -> None:
    found = await compare(tmp_path, num_requests=100, logs=("template", "window"))
    check(found["embedded"], at_least=35)


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One for all tests, as it starts for long: the models of all stages are alike."""
    with vllm_server(Stage(tmp_path_factory.mktemp("vllm"), CAPACITY_TOKENS)) as server:
        yield server


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="vLLM's CPU wheel is built for Linux")
async def test_vllm_with_one_replica_decides_the_same(vllm: Server, tmp_path: Path) -> None:
    """
    As the replay and as the embedded engine; it computes what was planned, and holds after each request what
    the proxy says that it holds.
    """
    found = await compare(tmp_path, num_requests=60, vllm=vllm, by_embedding=True)
    check(found["vllm"], at_least=20)
    check(found["embedded"], at_least=20)
    assert found["vllm"].served.decisions == found["embedded"].served.decisions


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="vLLM's CPU wheel is built for Linux")
async def test_repairs_that_are_chosen_are_the_same_in_both_engines(vllm: Server, tmp_path: Path) -> None:
    """
    Request by request, and so what can be copied later; a replay cannot know which tokens are chosen.

    The mean is limited: by certified bounds one of these 60 is shared in one engine and not in the other.
    """
    found = await compare(tmp_path, num_requests=60, vllm=vllm, repair_rule="attention", max_risk=1.0)
    decisions = found["embedded"].served.decisions
    assert found["vllm"].served.decisions == decisions
    assert sum(one.decision == "approx" for one in decisions) >= 20
    assert sum(one.repaired for one in decisions) >= 1000
