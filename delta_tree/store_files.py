"""A store as files: whether another process has it open, and moving it away, in whatever state it is."""

from pathlib import Path

from delta_tree.errors import StoreError, StoreLockedError
from delta_tree.storage import LOCK_WAIT_S, lock_once, translated


def set_aside(path: Path) -> Path:
    """
    Move a store away, whatever state it is in, with its journal; returns where to: `path` with `.old`.

    One is kept: an earlier one is replaced. Modes stay as they are.
    Raises:  StoreLockedError if a process has it open; StoreUnavailableError
    """
    lock_once(path)
    aside = _beside(path, ".old")
    with translated(path):
        # The earlier one's journal must not be taken for this one's.
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
    Refuse a store that another process has open; any other state, and none at all, is fine here.

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
