"""
The tree on disk: one SQLite file, one writer, every change one transaction.

If the process is killed, the file holds the state before or after a change, never one in between. Use
counters and lazy evictions are written with the next change, so a kill may lose them. This is the only file
that imports sqlite3; it turns SQLite's errors into those of errors.py.
"""

import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from delta_tree import errors, rows
from delta_tree.node import Change, Node
from delta_tree.rows import SCHEMA_VERSION

APPLICATION_ID = 0x4B565354  # "KVST"
LOCK_WAIT_S = 1.0  # a server that is about to stop may still hold the file


def journal_mode_for(version: tuple[int, int, int]) -> str:
    """Return WAL where SQLite has its fix for the WAL-reset corruption, else TRUNCATE."""
    fixed = version >= (3, 51, 3) or (
        (3, 50, 7) <= version < (3, 51, 0) or (3, 44, 6) <= version < (3, 45, 0)
    )
    return "WAL" if fixed else "TRUNCATE"


class Storage:
    """An open file. Lives as long as the tree that holds it; not thread-safe by itself."""

    def __init__(self, path: Path, connection: sqlite3.Connection, *, identity: str, read_only: bool) -> None:
        self._path = path
        self.identity = identity
        self._connection: sqlite3.Connection | None = connection
        self.read_only = read_only
        self._version = SCHEMA_VERSION

    @classmethod
    def open(cls, path: Path, *, identity: str | None, read_only: bool) -> "Storage":
        """
        Open the file, or create it; a new folder is readable by its owner only.

        `identity` names the model and everything else the stored KV depends on; None takes an existing
        store as it is, for an administrator who inspects or empties it.
        Raises:  MetadataStoreError, see errors.py
        """
        _prepare_file(path, must_exist=read_only or identity is None)
        with _translated(path):
            connection = sqlite3.connect(
                f"file:{quote(str(path.absolute()))}?mode=rw",
                uri=True,
                timeout=LOCK_WAIT_S,
                isolation_level=None,  # `_transaction` begins and ends transactions explicitly
                check_same_thread=False,  # the tree's lock lets only one thread in at a time
            )
        try:
            with _translated(path):
                stored_identity = _configure(connection, path, identity, read_only=read_only)
        except BaseException:
            connection.close()
            raise
        return cls(path, connection, identity=stored_identity, read_only=read_only)

    @property
    def has_nodes(self) -> bool:
        """Return whether the file holds a prompt. Raises MetadataStoreError."""
        with _translated(self._path):
            return self._open_connection().execute("SELECT 1 FROM nodes LIMIT 1").fetchone() is not None

    @property
    def is_writable(self) -> bool:
        """Return whether the file is open for changes."""
        return self._connection is not None and not self.read_only

    def load(self) -> Change:
        """
        Return all that is stored, as one change to an empty forest; each row is checked.

        Raises:  InvalidNodeError, EditRangeError, InvalidTokensError if a row is damaged; MetadataStoreError
        """
        connection = self._open_connection()
        with _translated(self._path), _transaction(connection, "DEFERRED"):
            self._version = int(_pragma(connection, "user_version"))
            return rows.load(self._version, connection.execute)

    def upgrade(self, stored: Change) -> None:
        """Write what was loaded in the format of this version, unless it is current or opened read-only."""
        if self._version == SCHEMA_VERSION or self.read_only:
            return
        self.replace(stored)

    def replace(self, content: Change) -> None:
        """Replace the whole content of the file, in this version's format. Raises MetadataStoreError."""
        connection = self._open_connection()
        with _translated(self._path), _transaction(connection):
            _create_tables(connection)
            self._put(connection, content)
        self._version = SCHEMA_VERSION

    def write(self, changes: Iterable[Change], used: Iterable[Node]) -> None:
        """
        Store changes in order, and the use counters of nodes that were touched, in one transaction.

        Raises:  StoreReadOnlyError, StoreUnavailableError, StoreCorruptError; nothing is written
        """
        if self.read_only:
            raise errors.StoreReadOnlyError(self._path)
        connection = self._open_connection()
        run = connection.executemany
        with _translated(self._path), _transaction(connection):
            for change in changes:
                run(rows.MOVE_CHILDREN, [{"gone": gone, "heir": heir} for gone, heir in change.heirs.items()])
                run("DELETE FROM nodes WHERE node_id = ?", [(entry,) for entry in change.dropped_nodes])
                run("DELETE FROM segments WHERE segment_id = ?", [(s,) for s in change.dropped_segments])
                self._put(connection, change)
            run(
                "UPDATE nodes SET last_used_at = ?, num_hits = ? WHERE node_id = ?",
                [(node.last_used_at, node.num_hits, node.node_id) for node in used],
            )

    def _put(self, connection: sqlite3.Connection, change: Change) -> None:
        run = connection.executemany
        run(rows.PUT_SEGMENT, [rows.segment_row(segment) for segment in change.put_segments])
        run(rows.PUT_NODE, [rows.node_row(node) for node in change.put_nodes])
        run(rows.PUT_PARENT, [{"node_id": n, "parent": parent} for n, parent in change.parents.items()])

    def close(self) -> None:
        """Release the file. Idempotent."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _open_connection(self) -> sqlite3.Connection:
        if self._connection is None:
            raise errors.StoreUnavailableError(self._path, "the tree has been closed")
        return self._connection


def aside_path(path: Path) -> Path:
    """Return the path to which `set_aside` moves a store."""
    return path.with_name(f"{path.name}.old")


def set_aside(path: Path) -> Path:
    """
    Move a store, damaged or not, and its journal to `path` with `.old` at its end, and return that path.

    An earlier `.old` is replaced. File modes stay as they are.
    Raises:  StoreLockedError if a process has it open; StoreUnavailableError
    """
    _check_lock(path, wait_s=0.0)
    aside = aside_path(path)
    with _translated(path):
        for store in (aside, path):  # the index of the WAL, which SQLite can build again
            store.with_name(f"{store.name}-shm").unlink(missing_ok=True)
        for suffix in ("-journal", "-wal"):
            # SQLite must not apply the journal of an earlier `.old` to this store.
            old = aside.with_name(aside.name + suffix)
            old.unlink(missing_ok=True)
            with suppress(FileNotFoundError):
                path.with_name(path.name + suffix).replace(old)
        path.replace(aside)
    return aside


def check_unlocked(path: Path) -> None:
    """Raise StoreLockedError if a process has this store open. The store may be damaged or missing."""
    with suppress(errors.StoreUnavailableError):
        _check_lock(path, wait_s=LOCK_WAIT_S)


def _check_lock(path: Path, *, wait_s: float) -> None:
    """Raises StoreLockedError if a process has the file open, StoreUnavailableError if it cannot be read."""
    # SQLite takes the lock before it reads the file: where it reports damage, no process holds the file.
    with suppress(errors.StoreCorruptError), _translated(path):
        if path.exists():
            with closing(sqlite3.connect(path, timeout=wait_s)) as connection:
                connection.execute("BEGIN EXCLUSIVE")
                connection.execute("ROLLBACK")


def _prepare_file(path: Path, *, must_exist: bool) -> None:
    if must_exist:
        if not path.exists():
            raise errors.StoreMissingError(path)
        return
    with _translated(path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # SQLite gives its journal the mode of the file, so both are the owner's only.
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))


def _configure(connection: sqlite3.Connection, path: Path, identity: str | None, *, read_only: bool) -> str:
    """Lock the file, create tables if it is empty, check that it is ours and intact. Return its identity."""
    if not read_only:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA foreign_keys = ON")
    is_empty = _pragma(connection, "page_count") == 0
    if is_empty and (read_only or identity is None):
        raise errors.StoreMissingError(path)
    if not is_empty:
        _check_stamp(connection, path)
    if read_only:
        # Not mode=ro: after a kill the journal must be rolled back before anything can be read.
        connection.execute("PRAGMA query_only = ON")
    else:
        mode = journal_mode_for(sqlite3.sqlite_version_info)
        connection.execute(f"PRAGMA journal_mode = {mode}")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA secure_delete = ON")  # a purge leaves no token ids behind
        # In exclusive mode the lock is held after the transaction: this process is the only writer now.
        with _transaction(connection, "EXCLUSIVE"):
            pass
    if is_empty:
        with _transaction(connection):
            connection.execute("CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT")
            connection.execute("INSERT INTO meta VALUES ('identity', ?)", (identity,))
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            _create_tables(connection)
    return _check_content(connection, path, identity)


def _create_tables(connection: sqlite3.Connection) -> None:
    for statement in rows.SCHEMA:
        connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _check_stamp(connection: sqlite3.Connection, path: Path) -> None:
    application_id = _pragma(connection, "application_id")
    if application_id != APPLICATION_ID:
        raise errors.StoreForeignError(
            path, f"another program (application id {application_id:#x})", "a KVShare store"
        )
    version = _pragma(connection, "user_version")
    if version not in range(1, SCHEMA_VERSION + 1):
        raise errors.StoreMismatchError(path, f"schema version {version}", f"schema version {SCHEMA_VERSION}")


def _check_content(connection: sqlite3.Connection, path: Path, identity: str | None) -> str:
    verdict = _pragma(connection, "quick_check(1)")
    if verdict != "ok":
        raise errors.StoreCorruptError(path, " ".join(str(verdict).split()))
    row = connection.execute("SELECT value FROM meta WHERE key = 'identity'").fetchone()
    if row is None:
        raise errors.StoreCorruptError(path, "it does not name the model it was written for")
    if identity is not None and row[0] != identity:
        raise errors.StoreMismatchError(path, f"identity {row[0]}", f"identity {identity}")
    return str(row[0])


def _pragma(connection: sqlite3.Connection, name: str) -> int | str:
    value: int | str = connection.execute(f"PRAGMA {name}").fetchone()[0]
    return value


@contextmanager
def _transaction(connection: sqlite3.Connection, kind: str = "IMMEDIATE") -> Iterator[None]:
    connection.execute(f"BEGIN {kind}")
    with connection:  # commits, or after an error rolls back unless SQLite did, as when the disk is full
        yield


_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_UNAVAILABLE = {
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_INTERRUPT,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_PROTOCOL,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_AUTH,
}


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    """Turn errors of SQLite and the system into ours. Any SQLite code in neither set above means damage."""
    try:
        yield
    except OSError as exc:
        raise errors.StoreUnavailableError(path, exc.strerror or type(exc).__name__) from exc
    except sqlite3.Error as exc:
        primary = getattr(exc, "sqlite_errorcode", 0) & 0xFF
        if primary in _BUSY:
            raise errors.StoreLockedError(path) from exc
        if primary in _UNAVAILABLE:
            raise errors.StoreUnavailableError(path, str(exc)) from exc
        raise errors.StoreCorruptError(path, str(exc)) from exc
