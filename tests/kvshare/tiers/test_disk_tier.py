"""Segments as files: what a start finds, what is never served, and errors of the disk."""

import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from delta_tree import Segment, SegmentId
from kvshare.kv.layout import KVLayout
from kvshare.tiers.disk_tier import DiskTier
from kvshare.tiers.lower_tier import BusyError
from tests.kvshare.tiers.faulty_files import FaultyFiles, ShortFiles, failing
from tests.kvshare.tiers.stored import LAYOUT, disk_at, form, is_same, only_file, segment


def put(tier: DiskTier, *numbers: int) -> None:
    for number in numbers:
        described, kv = segment(number)
        tier.write(described, kv.rows())


def restarted(folder: Path, *numbers: int) -> DiskTier:
    """A tier of the next process, whose tree has these segments."""
    tier = disk_at(folder)
    described = [segment(number)[0] for number in numbers]
    whole = tier.whole(described)
    tier.adopt(each for each in described if each.segment_id in whole)
    return tier


def sweep(tier: DiskTier) -> int:
    count = 0
    while tier.sweep():
        count += 1
    return count


def test_what_was_written_is_there_after_a_restart(tmp_path: Path) -> None:
    """With its bytes; they are counted as the tree counts them."""
    put(disk_at(tmp_path), 1, 2)
    tier = restarted(tmp_path, 1, 2)
    assert len(tier) == 2
    assert tier.num_bytes == sum(segment(number)[0].num_bytes for number in (1, 2))
    for number in (1, 2):
        assert is_same(tier.read(SegmentId(number)), segment(number)[1])


def test_files_and_folders_are_their_owners_only(tmp_path: Path) -> None:
    """What is on disk is as private as the metadata."""
    put(disk_at(tmp_path / "kv"), 1)
    modes = {path.stat().st_mode & 0o077 for path in (tmp_path / "kv").rglob("*")}
    assert modes == {0}


def test_what_belongs_to_no_prompt_is_deleted(tmp_path: Path) -> None:
    """Objects without a record, unfinished ones, and those of another model; not files of somebody else."""
    put(disk_at(tmp_path), 1, 2)
    unfinished = only_file_of(tmp_path, 1).with_suffix(".kv.tmp")
    unfinished.write_bytes(b"half")
    other = disk_at(tmp_path, of=form(LAYOUT, "another model"))
    put(other, 3)
    foreign = only_file_of(tmp_path, 3).with_name("notes.txt")
    foreign.write_text("mine")
    tier = restarted(tmp_path, 1)
    assert sweep(tier) == 3
    assert [path.name for path in sorted(tmp_path.rglob("*.*"))] == [f"{1:016x}.kv", "notes.txt"]
    assert is_same(tier.read(SegmentId(1)), segment(1)[1])


def opened_late(folder: Path, *numbers: int, **settings: Any) -> DiskTier:
    """After it was swept, as by a writer that has nothing to write yet."""
    given = {"max_bytes": 10**9, "keep_free_bytes": 0, **settings}
    tier = DiskTier(folder, form(), **given)
    assert not tier.sweep()
    tier.open_late([segment(number)[0] for number in numbers])
    return tier


def test_other_models_are_deleted_after_a_late_open_too(tmp_path: Path) -> None:
    """The writer has swept before."""
    put(disk_at(tmp_path, of=form(LAYOUT, "another model")), 3)
    assert sweep(opened_late(tmp_path)) == 1
    assert not list(tmp_path.rglob("*.kv"))


def test_files_of_a_store_that_was_moved_aside_stay_until_they_are_in_the_way(tmp_path: Path) -> None:
    """As many as there is room for. An open that is not late deletes them."""
    put(disk_at(tmp_path), 1, 2, 3)
    both = 2 * only_file_of(tmp_path, 2).stat().st_size
    tier = opened_late(tmp_path, 1, max_bytes=2 * segment(1)[0].num_bytes + both - 1)
    assert (sweep(tier), len(tier), len(list(tmp_path.rglob("*.kv")))) == (0, 1, 3)
    put(tier, 4)
    assert sweep(tier) == 1
    assert is_same(tier.read(SegmentId(1)), segment(1)[1])
    assert sweep(restarted(tmp_path, 1, 4)) == 1


def test_nothing_is_written_until_what_is_there_is_held(tmp_path: Path) -> None:
    """Of a late open, which another thread may write beside."""
    put(disk_at(tmp_path), 1)
    tier = DiskTier(tmp_path, form(), max_bytes=10**9, keep_free_bytes=0)

    def while_it_opens() -> Iterator[Segment]:
        assert not tier.is_open
        assert tier._lock.locked()
        yield segment(1)[0]

    tier.open_late(while_it_opens())
    assert (tier.is_open, len(tier)) == (True, 1)


def test_files_say_which_segments_they_are(tmp_path: Path) -> None:
    """Where there is no tree: also with headers of several pages; not what is torn or of another name."""
    many = KVLayout.uniform(900, 1, 1, dtype=torch.float32, device=torch.device("cpu"))
    for layout, numbers in ((LAYOUT, (1, 2, 3, 4, 5)), (many, (6,))):
        tier = disk_at(tmp_path, of=form(layout))
        for number in numbers:
            described, kv = segment(number, layout=layout)
            tier.write(described, kv.rows())
    torn, renamed, garbage = (only_file_of(tmp_path, number) for number in (2, 3, 4))
    torn.write_bytes(torn.read_bytes()[:-1])
    renamed.rename(renamed.with_name(f"{7:016x}.kv"))
    garbage.write_bytes(b"\xff" * garbage.stat().st_size)
    for layout, whole in ((LAYOUT, [1, 5]), (many, [6])):
        again = disk_at(tmp_path, of=form(layout))
        found = sorted(again.described(), key=lambda each: each.segment_id)
        assert found == [segment(number, layout=layout)[0] for number in whole]
        again.adopt(found)
        for number in whole:
            assert is_same(again.read(SegmentId(number)), segment(number, layout=layout)[1])


def test_a_header_that_lies_is_found_when_it_is_read(tmp_path: Path) -> None:
    """It is adopted for what it says, and never served as that."""
    put(disk_at(tmp_path), 1)
    path = only_file_of(tmp_path, 1)
    path.write_bytes(path.read_bytes().replace(b"ab" * 32, b"cd" * 32))
    tier = disk_at(tmp_path)
    (found,) = tier.described()
    assert found.namespace == "cd" * 32
    tier.adopt([found])
    assert tier.read(SegmentId(1)) is None
    assert SegmentId(1) not in tier


def only_file_of(folder: Path, number: int) -> Path:
    (found,) = folder.rglob(f"{number:016x}.kv")
    return found


@pytest.mark.parametrize("fate", ["shorter", "longer", "empty", "gone", "a link"])
def test_a_file_of_another_size_is_not_found_at_the_start(tmp_path: Path, fate: str) -> None:
    """Sizes are compared, and nothing is read: a server with many objects starts as quickly."""
    put(disk_at(tmp_path), 1)
    path = only_file(tmp_path)
    raw = path.read_bytes()
    path.unlink()
    if fate == "a link":
        (tmp_path / "elsewhere").write_bytes(raw)
        path.symlink_to(tmp_path / "elsewhere")
    elif fate != "gone":
        path.write_bytes({"shorter": raw[:-1], "longer": raw + b"x", "empty": b""}[fate])
    assert disk_at(tmp_path).whole([segment(1)[0]]) == frozenset()


@pytest.mark.parametrize("fate", ["flipped", "swapped", "gone", "another model's", "another version's"])
def test_what_is_not_the_segment_is_a_miss_and_is_deleted(tmp_path: Path, fate: str) -> None:
    """A file that was changed, by hand or by the disk, is never served; the others are."""
    tier = disk_at(tmp_path)
    put(tier, 1, 2)
    path = only_file_of(tmp_path, 1)
    raw = path.read_bytes()
    if fate == "flipped":
        path.write_bytes(raw[:-3] + bytes([raw[-3] ^ 1]) + raw[-2:])
    elif fate == "swapped":
        path.write_bytes(only_file_of(tmp_path, 2).read_bytes())
    elif fate == "gone":
        path.unlink()
    elif fate == "another model's":
        other = disk_at(tmp_path / "other", of=form(LAYOUT, "another"))
        put(other, 1)
        path.write_bytes(only_file(tmp_path / "other").read_bytes())
    else:
        path.write_bytes(raw.replace(b"kvshare segment 1", b"kvshare segment 2"))
    assert tier.read(SegmentId(1)) is None
    assert SegmentId(1) not in tier
    sweep(tier)
    assert not path.exists()
    assert tier.counts["damaged"] + tier.counts["failed"] == 1
    assert is_same(tier.read(SegmentId(2)), segment(2)[1])
    assert tier.num_bytes == segment(2)[0].num_bytes


def test_a_record_of_other_bytes_is_a_miss(tmp_path: Path) -> None:
    """The file is compared with what the tree says of the segment, also with its checksum."""
    put(disk_at(tmp_path), 1)
    tier = disk_at(tmp_path)
    tier.adopt([replace(segment(1)[0], checksum=1)])
    assert tier.read(SegmentId(1)) is None


def test_another_layout_or_part_has_another_folder() -> None:
    """Model, tokenizer, dtype, movement of keys, calibration: with any other nothing is found."""
    half = KVLayout.uniform(2, 3, 4, dtype=torch.bfloat16, device=torch.device("cpu"))
    forms = [form(), form(half), form(LAYOUT, "another"), form(LAYOUT, "model", "x"), form(LAYOUT, "modelx")]
    assert len({each.fingerprint[:16] for each in forms}) == len(forms)
    assert form().fingerprint == form().fingerprint


@pytest.mark.parametrize("call", ["create", "write", "sync", "rename"])
def test_a_write_that_fails_leaves_nothing(tmp_path: Path, call: str) -> None:
    """Neither a file nor a record; the next start finds nothing of it."""
    tier = disk_at(tmp_path, files=failing(call, errno.ENOSPC))
    with pytest.raises(OSError, match="No space"):
        put(tier, 1)
    assert SegmentId(1) not in tier
    assert list(tmp_path.rglob("*.kv*")) == []
    assert tier.num_bytes == 0


def test_nothing_is_written_to_a_disk_that_is_nearly_full(tmp_path: Path) -> None:
    """What is to be left free stays free."""
    tier = disk_at(tmp_path, keep_free_bytes=1 << 60)
    with pytest.raises(OSError, match="less space"):
        put(tier, 1)
    assert list(tmp_path.rglob("*.kv*")) == []


@pytest.mark.parametrize("call", ["open", "read"])
def test_a_read_that_fails_is_a_miss(tmp_path: Path, call: str) -> None:
    """The object is dropped: what cannot be read once may be wrong the next time."""
    put(disk_at(tmp_path), 1)
    tier = disk_at(tmp_path, files=failing(call))
    tier.adopt([segment(1)[0]])
    assert tier.read(SegmentId(1)) is None
    assert SegmentId(1) not in tier


def test_a_process_without_room_for_files_keeps_the_object(tmp_path: Path) -> None:
    """Too many open files say nothing about this one."""
    put(disk_at(tmp_path), 1)
    state = {"number": errno.EMFILE}
    tier = disk_at(tmp_path, files=FaultyFiles(lambda name: state.get("number") if name == "open" else None))
    tier.adopt([segment(1)[0]])
    with pytest.raises(BusyError):
        tier.read(SegmentId(1))
    state.clear()
    assert is_same(tier.read(SegmentId(1)), segment(1)[1])


def test_short_reads_and_writes_are_continued(tmp_path: Path) -> None:
    """The system may read or write fewer bytes than asked."""
    tier = disk_at(tmp_path, files=ShortFiles())
    put(tier, 1)
    assert is_same(tier.read(SegmentId(1)), segment(1)[1])


def test_a_file_that_cannot_be_deleted_belongs_to_nothing(tmp_path: Path) -> None:
    """It is out of the accounts, never read again, and deleted at the next start."""
    tier = disk_at(tmp_path, files=failing("delete"))
    put(tier, 1)
    tier.drop([SegmentId(1), SegmentId(9)])
    assert sweep(tier) == 1
    assert (tier.num_bytes, tier.read(SegmentId(1))) == (0, None)
    assert sweep(restarted(tmp_path)) == 1
    assert list(tmp_path.rglob("*.kv")) == []


def test_no_file_stays_open(tmp_path: Path) -> None:
    """Neither after reads nor after errors."""
    tier = disk_at(tmp_path)
    put(tier, 1, 2)
    only_file_of(tmp_path, 1).write_bytes(b"short")
    before = len(os.listdir("/proc/self/fd"))
    for number in (1, 2, 2, 9):
        tier.read(SegmentId(number))
    assert len(os.listdir("/proc/self/fd")) == before
