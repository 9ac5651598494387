"""`kvshare bench commit`, at a size at which its times say nothing."""

from kvshare_lab.bench import commit


def test_only_the_full_store_evicts() -> None:
    """Each commit into it evicts one prompt; the half-full one grows instead."""
    document = commit.run(stored=40, prompt_tokens=200, commits=10)
    half, full = document["half_full"], document["full"]
    assert (half["evictions_per_commit"], full["evictions_per_commit"]) == (0.0, 1.0)
    assert (half["num_prompts"], full["num_prompts"]) == (30, 40)
    assert document["commits"] == 10
    assert document["full_over_half"] > 0
    for arm in (half, full):
        assert arm["p99_ms"] >= arm["p50_ms"] > 0


def test_templates_outlive_many_commits() -> None:
    """More prompts than the store has: a template is used too often to be the one that is evicted."""
    document = commit.run(stored=400, prompt_tokens=100, commits=200)
    assert document["full"]["evictions_per_commit"] == 1.0
