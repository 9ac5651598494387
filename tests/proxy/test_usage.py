"""The file of what keys have used, where it cannot be read, moved or written."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.usage import USAGE_FILE, UsageLedger


def refuse(*_: object) -> bytes:
    raise PermissionError(13, "Permission denied")


def test_a_file_that_can_be_read_later_is_well_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no request came since, so that nothing is written."""
    (tmp_path / USAGE_FILE).write_text('{"version": 1, "rows": []}')
    ledger = UsageLedger(str(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", refuse)  # as root may read everything
        ledger.load()
        ledger.save()
        assert ledger.problem == "the file cannot be read: Permission denied"
    ledger.save()
    assert ledger.problem is None


def test_a_file_that_is_gone_later_is_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing to read then."""
    (tmp_path / USAGE_FILE).write_text('{"version": 1, "rows": []}')
    ledger = UsageLedger(str(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", refuse)
        ledger.load()
    (tmp_path / USAGE_FILE).unlink()
    ledger.save()
    assert ledger.problem is None


def test_a_damaged_file_that_cannot_be_moved_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is raised, at the start or later; once it can be moved, it is, and that is said once."""
    (tmp_path / USAGE_FILE).write_text("damaged")
    ledger = UsageLedger(str(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", refuse)
        ledger.load()
        ledger.save()
        assert ledger.problem == "the file is damaged, and cannot be moved aside: Permission denied"
    assert (tmp_path / USAGE_FILE).read_text() == "damaged"
    ledger.save()
    assert ledger.problem is None
    assert (tmp_path / f"{USAGE_FILE}.old").read_text() == "damaged"
