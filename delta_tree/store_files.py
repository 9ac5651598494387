"""The files of a store, damaged or not: check that no process has it open, and move it away."""

from pathlib import Path

from delta_tree.errors import StoreError, StoreLockedError
from delta_tree.storage import LOCK_WAIT_S, lock_once, translated


def set_aside(path: Path) -> Path:
    """
    Move a store and its journal to `path` with `.old` behind it, and return that path.

    The store may be damaged. An earlier `.old` is replaced. File modes stay as they are.
    Raises:  StoreLockedError if a process has it open; StoreUnavailableError
    """
    lock_once(path)
    aside = _beside(path, ".old")
    with translated(path):
        # SQLite must not apply the journal of an earlier `.old` to this store.
        for suffix in ("-journal", "-wal", "-shm"):
            _beside(aside, suffix).unlink(missing_ok=True)
        for suffix in ("-journal", "-wal"):
            if _beside(path, suffix).exists():
                _beside(path, suffix).replace(_beside(aside, suffix))
        path.replace(aside)
        _beside(path, "-shm").unlink(missing_ok=True)
    return aside


def check_unlocked(path: Path) -> None:
    """
    Check that no other process has this store open. A damaged or missing store is accepted.

    Raises:  StoreLockedError
    """
    try:
        lock_once(path, wait_s=LOCK_WAIT_S)
    except StoreLockedError:
        raise
    except StoreError:
        pass


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)
