"""Which replicas have a disk, over restarts of the proxy."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvshare.fleet.known_disks import DISKS_FILE, KnownDisks


def test_what_is_noted_is_known_after_a_restart(tmp_path: Path) -> None:
    """Until the replica has none any more; the file is for its owner only."""
    disks = KnownDisks(str(tmp_path))
    for name in ("a", "b"):
        disks.note(name, has_disk=True)
    disks.note("a", has_disk=False)
    assert KnownDisks(str(tmp_path)).names == {"b"}
    assert [path.name for path in tmp_path.iterdir()] == [DISKS_FILE]
    assert (tmp_path / DISKS_FILE).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("text", ["", "{}", "[1]", "no json", "\x00"])
def test_a_damaged_file_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / DISKS_FILE).write_text(text)
    assert KnownDisks(str(tmp_path)).names == frozenset()


def test_a_folder_that_cannot_be_written_costs_the_memory_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One line in the log; without a store nothing is written."""
    (tmp_path / "file").write_text("")
    for folder in (str(tmp_path / "file"), None):
        disks = KnownDisks(folder)
        disks.note("a", has_disk=True)
        assert disks.names == {"a"}
    assert len([message for message in caplog.messages if "cannot remember" in message]) == 1
