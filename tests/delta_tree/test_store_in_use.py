"""One writer: a store that is open elsewhere, and one that is set aside."""

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from delta_tree import (
    DeltaTree,
    StoreLockedError,
    check_unlocked,
    set_aside,
)
from tests.delta_tree.fake_prompts import fresh_draft
from tests.delta_tree.stores import IDENTITY


@pytest.mark.parametrize("read_only", [False, True])
def test_a_second_process_is_refused(filled: Path, read_only: bool) -> None:
    """While one process writes, any other is turned away with a clear message."""
    program = (
        "import sys\nfrom pathlib import Path\nfrom delta_tree import *\n"
        "try:\n"
        f"    DeltaTree.open(Path(sys.argv[1]), identity={IDENTITY!r}, read_only={read_only})\n"
        "except StoreLockedError as exc:\n    sys.exit(str(exc))\n"
    )
    with DeltaTree.open(filled, identity=IDENTITY):
        second = subprocess.run(
            [sys.executable, "-c", program, str(filled)],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
    assert second.returncode == 1
    assert "another process has this store open" in second.stderr


def test_a_second_tree_in_this_process_is_refused(filled: Path) -> None:
    """The lock also holds between two trees of one process."""
    with DeltaTree.open(filled, identity=IDENTITY) as tree:
        with pytest.raises(StoreLockedError):
            DeltaTree.open(filled, identity=IDENTITY)
        assert tree.insert(fresh_draft([1])).created


@pytest.mark.parametrize("blob", [None, b"", b"no database" * 999])
def test_a_store_can_be_set_aside_in_any_state(filled: Path, blob: bytes | None) -> None:
    """The last one is kept, with its bytes and its mode; a new one can begin."""
    for _ in range(2):
        if blob is not None:
            filled.write_bytes(blob)
        before = filled.read_bytes()
        aside = set_aside(filled)
        assert aside.read_bytes() == before
        assert stat.S_IMODE(aside.stat().st_mode) == 0o600
        assert not filled.exists()
        with DeltaTree.open(filled, identity="model-b") as tree:
            assert tree.nodes() == ()
    names = {path.name.removesuffix("-journal") for path in filled.parent.iterdir()}
    assert names == {filled.name, aside.name}


def test_a_journal_is_set_aside_with_its_store(filled: Path) -> None:
    """An earlier one's journal is never taken for a later one's, nor is one left for the next store."""
    journal, old = (filled.with_name(filled.name + suffix) for suffix in ("-journal", ".old-journal"))
    old.write_bytes(b"of an earlier store")
    set_aside(filled)
    assert not old.exists() or old.read_bytes() == b""
    filled.write_bytes(b"damaged" * 999)
    journal.write_bytes(b"its journal")
    set_aside(filled)
    assert not journal.exists()


def test_a_store_in_use_is_not_set_aside(filled: Path) -> None:
    """It is not moved under a running server, and the error comes before any weights are loaded."""
    with DeltaTree.open(filled, identity=IDENTITY):
        for refuse in (set_aside, check_unlocked):
            with pytest.raises(StoreLockedError):
                refuse(filled)
    assert filled.exists()


@pytest.mark.parametrize("blob", [None, b"", b"no database" * 999])
def test_a_store_that_is_not_open_is_unlocked(filled: Path, blob: bytes | None) -> None:
    """In whatever state it is, it is left as it is."""
    if blob is not None:
        filled.write_bytes(blob)
    before = filled.read_bytes()
    check_unlocked(filled)
    check_unlocked(filled.with_name("missing"))
    assert filled.read_bytes() == before
    assert not filled.with_name("missing").exists()
