"""`kvshare store verify` and `gc`, `kvshare tiers` and `evict`: the KV on disk of a stopped server."""

import shutil
from pathlib import Path

import pytest

from tests.kvshare.cli.conftest import Cli
from tests.kvshare.tiers.small_store import SmallStore

JSON = ("--format", "json")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two prompts of three segments each."""
    store = SmallStore(tmp_path / "store")
    for number in range(2):
        store.store(number)
    store.close()
    return tmp_path / "store"


def objects(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv*"))


def test_whole_kv_is_verified(cli: Cli, folder: Path) -> None:
    """All bytes are read; on a terminal one line says so."""
    found = cli("store", "verify", "--store", folder, *JSON)
    assert (found.code, found.document["num_objects"], found.document["damaged"]) == (0, 6, [])
    assert found.document["num_bytes"] == sum(path.stat().st_size for path in objects(folder))
    assert "6 objects of KV" in cli("store", "verify", "--store", folder).stdout


def test_damaged_kv_is_named(cli: Cli, folder: Path) -> None:
    """With exit code 1, and the problem of each file."""
    flipped, swapped, cut, *_ = objects(folder)
    raw = bytearray(flipped.read_bytes())
    raw[-1] ^= 1
    flipped.write_bytes(raw)
    swapped.write_bytes(objects(folder)[-1].read_bytes())
    cut.write_bytes(cut.read_bytes()[:-5])
    found = cli("store", "verify", "--store", folder, *JSON)
    assert found.code == 1
    problems = {Path(damage["file"]).name: damage["problem"] for damage in found.document["damaged"]}
    assert problems == {
        flipped.name: "its bytes do not match their checks",
        swapped.name: "it is another segment",
        cut.name: "it ends 5 bytes too early",
    }
    shown = cli("store", "verify", "--store", folder)
    assert (shown.code, "3 objects damaged" in shown.stdout) == (1, True)


def test_what_belongs_to_no_prompt_is_collected(cli: Cli, folder: Path) -> None:
    """A dry run only counts; objects of prompts, and files of somebody else, stay."""
    mine = objects(folder)
    shelf = mine[0].parent
    litter = [shelf / f"{1:016x}.kv", shelf / f"{2:016x}.kv.tmp"]
    for path in litter:
        path.write_bytes(b"four")
    (shelf / "notes.txt").write_text("mine")
    dry = cli("store", "gc", "--store", folder, "--dry-run", *JSON)
    assert dry.document == {"dry_run": True, "num_files": 2, "num_bytes": 8}
    assert all(path.exists() for path in litter)
    assert (
        cli("store", "gc", "--store", folder).stdout
        == "deleted 2 files of KV that belong to no prompt, 8 B\n"
    )
    assert objects(folder) == mine
    assert (shelf / "notes.txt").exists()


def test_a_store_that_a_server_has_open_is_not_collected(cli: Cli, folder: Path) -> None:
    """It is verified all the same."""
    running = SmallStore(folder)
    outcome = cli("store", "gc", "--store", folder)
    assert (outcome.code, "another process" in outcome.stderr) == (1, True)
    assert cli("store", "verify", "--store", folder).code == 0
    running.close()
    assert len(objects(folder)) == 6


def test_tiers_of_a_stopped_store(cli: Cli, folder: Path) -> None:
    """What is on disk; counts are a running server's."""
    found = cli("tiers", "--store", folder, *JSON)
    (disk,) = found.document["tiers"]
    assert (disk["name"], disk["num_segments"], disk["num_hits"]) == ("disk", 6, None)
    assert cli("tiers", "--store", folder).stdout.splitlines()[-1].split()[:2] == ["disk", "6"]


def test_evicted_prompts_leave_the_disk(cli: Cli, folder: Path) -> None:
    """One with its own KV, then everything."""
    (root, _) = cli("tree", "--store", folder, *JSON).document["roots"]
    assert cli("evict", root["id"], "--store", folder, "--dry-run").code == 0
    assert len(objects(folder)) == 6
    assert cli("evict", root["id"], "--store", folder).code == 0
    assert len(objects(folder)) == 3
    again = SmallStore(folder)
    assert len(again.tree.nodes()) == 1
    again.close()
    assert cli("evict", "--all", "--yes", "--store", folder).code == 0
    assert objects(folder) == []


def test_the_files_of_a_vllm_are_seen_and_left_alone(cli: Cli, folder: Path, tmp_path: Path) -> None:
    """In a store's folder, or in one of their own, a folder for each data-parallel rank; `gc` keeps them."""
    for place in (folder / "vllm-kv", tmp_path / "own" / "rank-0" / "vllm-kv"):
        shutil.copytree(folder / "kv", place)
    both = cli("tiers", "--store", folder, *JSON).document["tiers"]
    assert [(tier["name"], tier["num_segments"]) for tier in both] == [("disk", 6), ("disk of vLLM", 6)]
    (own,) = cli("tiers", "--store", tmp_path / "own", *JSON).document["tiers"]
    assert (own["name"], own["num_segments"]) == ("disk of vLLM", 6)
    damaged = objects(tmp_path / "own")[0]
    damaged.write_bytes(damaged.read_bytes()[:-5])
    found = cli("store", "verify", "--store", tmp_path / "own", *JSON)
    assert (found.code, found.document["num_objects"], len(found.document["damaged"])) == (1, 6, 1)
    with_store = cli("store", "verify", "--store", folder, *JSON)
    assert (with_store.code, with_store.document["num_objects"]) == (0, 12)
    assert cli("store", "gc", "--store", folder).code == 0
    assert len(objects(folder)) == 12
