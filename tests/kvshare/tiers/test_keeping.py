"""The store over memory and disk: what is evicted for which of them, and what a restart finds."""

import errno
from pathlib import Path

import pytest

from kvshare.admin import Evict, checked
from kvshare.kv.tier import MemoryTier
from tests.kvshare.tiers.faulty_files import FaultyFiles, WaitingFiles
from tests.kvshare.tiers.small_store import (
    PROMPT_TOKENS,
    SEGMENT_BYTES,
    SEGMENT_TOKENS,
    SmallStore,
    prompt,
    wrong_nodes,
)
from tests.kvshare.tiers.stored import NAMESPACE


def lengths(store: SmallStore) -> dict[int, int]:
    """By the number of its prompt: how many tokens are stored."""
    return {
        number: node.num_tokens
        for number in range(100)
        for node in store.tree.nodes()
        if (node.token_ids == prompt(number, node.num_tokens)).all()
    }


def test_memory_holds_a_part_and_the_disk_all(tmp_path: Path) -> None:
    """A memory for four prompts, a disk for eight: the ninth evicts the first, from disk."""
    store = SmallStore(tmp_path, memory=12, disk=24)
    for number in range(9):
        assert store.store(number) is not None
        store.settle()
    assert sorted(lengths(store)) == list(range(1, 9))
    memory, disk = store.stack.status()
    assert (memory.num_bytes, disk.num_bytes) == (12 * SEGMENT_BYTES, 24 * SEGMENT_BYTES)
    assert wrong_nodes(store) == []
    store.close()


def test_a_restart_finds_all_prompts_and_their_lineage(tmp_path: Path) -> None:
    """Also what was lengthened, pinned, and used; bytes are read when they are needed."""
    store = SmallStore(tmp_path)
    first = store.store(0)
    assert first is not None
    assert store.lengthen(first, 0, PROMPT_TOKENS + 20) is not None
    store.store(1)
    store.tree.pin(first.node_id)
    store.tree.touch(first.node_id)
    store.close()
    again = SmallStore(tmp_path)
    assert lengths(again) == {0: PROMPT_TOKENS + 20, 1: PROMPT_TOKENS}
    assert (again.stack.num_bytes, again.forgotten) == (0, [])
    node = again.tree.node(first.node_id)
    assert (node.pinned, node.num_hits) == (True, 1)
    assert wrong_nodes(again) == []
    assert again.store(0, PROMPT_TOKENS + 20) is None  # is stored
    again.close()


def test_prompts_that_lost_their_end_are_shortened(tmp_path: Path) -> None:
    """One that lost its beginning is gone, and nothing is left of it."""
    store = SmallStore(tmp_path)
    nodes = [store.store(number) for number in range(3)]
    store.settle()
    files = {path.stem: path for path in tmp_path.rglob("*.kv")}
    for node, lost in zip(nodes[:2], (2, 0), strict=True):
        assert node is not None
        _, segment_id, _, _ = node.pieces.rows()[lost]
        files[f"{segment_id:016x}"].unlink()
    store.close()
    again = SmallStore(tmp_path)
    assert lengths(again) == {0: 2 * SEGMENT_TOKENS, 2: PROMPT_TOKENS}
    assert [node_id for _, node_id in again.forgotten] == [nodes[1] and nodes[1].node_id]
    assert wrong_nodes(again) == []
    again.close()
    assert len(list(tmp_path.rglob("*.kv"))) == 5


@pytest.mark.parametrize("change", ["parts", "off", "no metadata"])
def test_what_may_not_be_used_is_not_there(tmp_path: Path, change: str) -> None:
    """Another model, tokenizer or calibration; a disk tier that is off; metadata that were deleted."""
    store = SmallStore(tmp_path)
    store.store(0)
    store.close()
    if change == "no metadata":
        (tmp_path / "tree.sqlite3").unlink()
    disk, parts = (0 if change == "off" else 24), ("another",) if change == "parts" else ()
    again = SmallStore(tmp_path, disk=disk, parts=parts)
    assert again.tree.nodes() == ()
    assert isinstance(again.keeper.tier, MemoryTier) is (change == "off")
    again.close()
    assert len(list(tmp_path.rglob("*.kv"))) == (3 if change == "off" else 0)


def test_what_an_administrator_evicts_leaves_the_disk(tmp_path: Path) -> None:
    """The command does not wait for that; no file of it is left soon after."""
    store = SmallStore(tmp_path)
    for number in range(3):
        store.store(number)
    store.settle()
    store.keeper.execute(checked(Evict, {"namespace": NAMESPACE, "dry_run": False}))
    store.settle()
    assert list(tmp_path.rglob("*.kv*")) == []
    store.close()


def test_a_disk_that_is_behind_costs_prompts_that_are_in_memory_only(tmp_path: Path) -> None:
    """Those on disk stay, and so does what the memory has room for."""
    files = WaitingFiles()
    store = SmallStore(tmp_path, memory=12, disk=60, files=files)
    for number in range(4):
        store.store(number)
        store.settle()
    files.may_write.clear()
    for number in range(4, 12):
        assert store.store(number) is not None
    kept = set(lengths(store))
    assert {0, 1, 2, 3, 11} <= kept
    assert len(kept) == 8
    files.may_write.set()
    store.settle()
    assert wrong_nodes(store) == []
    store.close()


def test_a_disk_that_fails_leaves_a_memory_as_it_was_without_one(tmp_path: Path) -> None:
    """Prompts are evicted for memory; what is on disk stays, and is found by the next process."""
    state: dict[str, int] = {}
    files = FaultyFiles(lambda name: state.get("number") if name == "sync" else None)
    store = SmallStore(tmp_path, memory=12, disk=24, files=files)
    for number in range(2):
        store.store(number)
        store.settle()
    state["number"] = errno.EIO
    for number in range(2, 20):
        assert store.store(number) is not None
    assert {0, 1, 19} <= set(lengths(store))
    assert wrong_nodes(store) == []
    state["number"] = errno.EIO
    store.tree.close()  # no flush: as a kill
    again = SmallStore(tmp_path)
    assert sorted(lengths(again)) == [0, 1]
    assert wrong_nodes(again) == []
    again.close()
    state.clear()
    store.keeper.close()


@pytest.mark.parametrize("limit", ["memory", "disk"])
def test_a_prompt_larger_than_a_tier_evicts_nothing(tmp_path: Path, limit: str) -> None:
    """It is not stored, and all others stay."""
    store = SmallStore(tmp_path, memory=6, disk=24 if limit == "memory" else 6)
    store.store(0)
    store.settle()
    assert store.store(1, 7 * SEGMENT_TOKENS) is None
    assert sorted(lengths(store)) == [0]
    store.close()
