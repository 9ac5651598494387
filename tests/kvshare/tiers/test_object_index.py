"""The index of a folder: as good as the headers, and never better than them."""

from dataclasses import replace
from pathlib import Path

import pytest

from delta_tree import SegmentId
from kvshare.tiers.disk_tier import DiskTier
from kvshare.tiers.files import Files
from kvshare.tiers.object_index import INDEX_FILE, read_index, write_index
from tests.kvshare.tiers.stored import disk_at, form, is_same, segment


class CountingFiles(Files):
    """Counts the files that are opened for reading."""

    def __init__(self) -> None:
        self.num_opened = 0

    def open(self, path: Path) -> int:
        self.num_opened += 1
        return super().open(path)


def filled(folder: Path, *numbers: int) -> DiskTier:
    tier = disk_at(folder)
    for number in numbers:
        described, kv = segment(number)
        tier.write(described, kv.rows())
    tier.save_index()
    return tier


def index_of(folder: Path) -> Path:
    (found,) = folder.rglob(INDEX_FILE)
    return found


def test_a_start_opens_the_index_only(tmp_path: Path) -> None:
    filled(tmp_path, *range(20))
    files = CountingFiles()
    tier = disk_at(tmp_path, files=files)
    found = tier.described()
    assert sorted(found, key=lambda each: each.segment_id) == [segment(number)[0] for number in range(20)]
    assert files.num_opened == 1
    tier.adopt(found)
    assert is_same(tier.read(SegmentId(7)), segment(7)[1])


def test_what_was_written_after_it_is_found_and_what_was_deleted_is_not(tmp_path: Path) -> None:
    tier = filled(tmp_path, 1, 2)
    described, kv = segment(3)
    tier.write(described, kv.rows())
    tier.drop([SegmentId(1)])
    while tier.sweep():
        pass
    found = {each.segment_id for each in disk_at(tmp_path).described()}
    assert found == {2, 3}


@pytest.mark.parametrize("spoil", ["cut", "flip", "empty", "missing", "other rows"])
def test_a_damaged_index_is_as_none(tmp_path: Path, spoil: str) -> None:
    filled(tmp_path, 1, 2)
    path = index_of(tmp_path)
    whole = path.read_bytes()
    spoiled = {
        "cut": whole[:-9],
        "flip": whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:],
        "empty": b"",
        "other rows": b"\0" * 16 + whole[16:],
    }
    path.unlink() if spoil == "missing" else path.write_bytes(spoiled[spoil])
    assert read_index(Files(), path.parent) == {}
    assert {each.segment_id for each in disk_at(tmp_path).described()} == {1, 2}


def test_an_index_that_lies_serves_nothing(tmp_path: Path) -> None:
    """It says that a file is of another namespace, or at another place: the object's own header decides."""
    filled(tmp_path, 1, 2)
    lies = [replace(segment(1)[0], namespace="cd" * 32), replace(segment(2)[0], first_position=5)]
    write_index(Files(), index_of(tmp_path).parent, lies)
    tier = disk_at(tmp_path)
    tier.adopt(tier.described())
    assert tier.read(SegmentId(1)) is tier.read(SegmentId(2)) is None
    assert tier.counts["damaged"] == 2


def test_the_folder_of_another_model_leaves_with_its_index(tmp_path: Path) -> None:
    filled(tmp_path, 1)
    other = disk_at(tmp_path, of=form(form().layout, "another model"))
    while other.sweep():
        pass
    assert not list(tmp_path.rglob(INDEX_FILE))
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [
        path for path in tmp_path.iterdir() if path.name == other.form.fingerprint[:16]
    ]
