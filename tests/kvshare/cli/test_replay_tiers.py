"""`kvshare replay --tier`: what it shows, and which sizes it refuses."""

from pathlib import Path

import pytest

from tests.kvshare.cli.conftest import Kvshare
from tests.kvshare.cli.live_replays import document_at

REPLAY = ("replay", "log.jsonl", "--tokenizer", "demo", "--arms", "kvshare-exact", "--out", "out")


@pytest.mark.usefixtures("log")
def test_tiers_are_shown_and_written(kvshare: Kvshare, tmp_path: Path) -> None:
    """A row for each policy of eviction; the document has the sizes as they were given."""
    tiers = ("--tier", "host:10%", "--tier", "disk:1TiB", "--eviction", "lru,worth")
    done = kvshare(*REPLAY, *tiers)
    assert done.code == 0
    assert "kvshare-exact, without limits" in done.stdout
    assert "worth" in done.stdout
    document = document_at(tmp_path / "out" / "tiers.json")
    assert [one["eviction"] for one in document["stacks"]] == ["lru", "worth"]
    assert document["stacks"][0]["size"] == {"host": "10%", "disk": "1TiB"}
    assert document["stacks"][0]["disk"]["max_bytes"] == 2**40
    as_json = kvshare(*REPLAY, "--tier", "host:1GiB", "--json")
    assert as_json.code == 0
    assert '"kind": "replay-tiers"' in as_json.stdout


@pytest.mark.usefixtures("log")
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--tier", "gpu:1GiB"), "expected host:SIZE or disk:SIZE"),
        (("--tier", "host"), "expected host:SIZE or disk:SIZE"),
        (("--tier", "host:much"), "expected a size such as 64GiB"),
        (("--tier", "host:0%"), "no room"),
        (("--tier", "host:1GiB,host:2GiB"), "given twice"),
        (("--tier", "disk:1GiB"), "expected host:SIZE, too"),
        (("--tier", "host:2GiB", "--tier", "disk:1GiB"), "disk:1GiB is less than host:2GiB"),
        (("--tier", "host:1GiB", "--capacity", "1k"), "cannot be used with --tier"),
        (("--tier", "host:1GiB", "--resume"), "cannot be used with --tier"),
        (("--tier", "host:1GiB", "--paper"), "cannot be used with --paper or --engine"),
        (("--tier", "host:1GiB", "--eviction", "fifo"), "expected some of adaptive"),
        (("--eviction", "lru"), "is an option of --tier"),
        (("--tier", "host:1GiB", "--arms", "prefix"), "has no tiers"),
    ],
)
def test_wrong_sizes_are_told(kvshare: Kvshare, arguments: tuple[str, ...], told: str) -> None:
    """Exit code 2 and a line that says what is expected, before the log is read."""
    done = kvshare(*REPLAY, *arguments)
    assert (done.code, done.stdout) == (2, "")
    assert told in " ".join(done.stderr.split())
