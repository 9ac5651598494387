"""The table of docs/benchmarks.md is that of its document, and no policy does better than the oracle."""

import json

from compare_evictions import HEADS, LOGS, POLICIES, SHARES, STORED, table
from delta_tree import DEFAULT_EVICTION
from quote import FOLDER

DOCUMENT = json.loads(STORED.read_text(encoding="utf-8"))


def test_the_page_has_the_table() -> None:
    """Every line of it, of every log."""
    page = (FOLDER.parent / "benchmarks.md").read_text(encoding="utf-8").splitlines()
    lines = list(table(DOCUMENT))
    assert len(lines) == 2 + len(LOGS) * len(SHARES)
    assert [line for line in lines if line not in page] == []


def test_the_oracle_is_the_best() -> None:
    """Of what is in memory, and in all; but for a part of a block, as it counts in blocks."""
    for log in DOCUMENT["logs"].values():
        for row in log["rows"]:
            in_all = dict(zip(HEADS, (both[0] for both in row), strict=True))
            assert all(in_all[name] <= in_all["oracle"] + 0.01 for name in POLICIES)


def test_the_default_is_nowhere_below_lru_and_lmcache() -> None:
    """In what is reused in all, but for a thousandth of it."""
    for log in DOCUMENT["logs"].values():
        for row in log["rows"]:
            in_all = dict(zip(HEADS, (both[0] for both in row), strict=True))
            assert in_all[DEFAULT_EVICTION] >= max(in_all["vllm lru"], in_all["lmcache"]) - 0.001
