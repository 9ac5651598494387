"""The table of docs/benchmarks.md is that of its document, and no policy does better than the oracle."""

import json

from compare_evictions import LOGS, POLICIES, SHARES, STORED, table
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
            assert all(row[name][0] <= row["oracle"][0] + 0.01 for name in POLICIES)
