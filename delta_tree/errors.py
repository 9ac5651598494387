"""
Everything that can go wrong in the delta tree.

DeltaTreeError
  + InvalidTokensError      values that are not token ids
  + EditRangeError          a span or an edit reaches past the prompt it is applied to
  + InvalidNodeError        a draft or node that is not valid; nothing was changed
  + UnknownNodeError        no node with this id (it may have been evicted)
  + UnknownSegmentError     no segment with this id (it may have been freed)
  + PinnedNodeError         a pinned node cannot be evicted
  + StoreError              a problem of the metadata file; it has the file's path
    - StoreMissingError     read-only open of a file that is not there
    - StoreCorruptError     the file is damaged
    - StoreMismatchError    the file belongs to another model or version
      . StoreForeignError   or to another program
    - StoreLockedError      another process has the file open for writing
    - StoreReadOnlyError    a change of a tree that was opened read-only
    - StoreUnavailableError the file cannot be read or written now (disk full, permissions)

Messages say what was found and what was expected; store errors also say what to do. No message contains
token ids.
"""

from pathlib import Path


class DeltaTreeError(Exception):
    """Root of this package's errors."""


class InvalidTokensError(DeltaTreeError, ValueError):
    """The values given are not a flat list of token ids."""


class EditRangeError(DeltaTreeError, ValueError):
    """A span, an edit or a piece reaches past the prompt it is applied to, or leaves a gap."""


class InvalidNodeError(DeltaTreeError, ValueError):
    """A draft that does not describe a whole prompt; the tree is unchanged."""


class UnknownNodeError(DeltaTreeError, LookupError):
    """No node has this id."""

    def __init__(self, node_id: int) -> None:
        super().__init__(f"no node {node_id} in the tree; it may have been evicted or purged")


class UnknownSegmentError(DeltaTreeError, LookupError):
    """No segment has this id."""

    def __init__(self, segment_id: int) -> None:
        super().__init__(f"no segment {segment_id} in the tree; its last node may be gone")


class PinnedNodeError(DeltaTreeError):
    """A pinned node is evicted only after `unpin`, or by a purge of its namespace."""

    def __init__(self, node_id: int) -> None:
        super().__init__(f"node {node_id} is pinned; unpin it first, or purge its namespace")


class StoreError(DeltaTreeError):
    """A problem of the metadata file at `path`."""

    def __init__(self, path: Path, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path = path


class StoreMissingError(StoreError):
    """A read-only open found no file."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            path, "there is no store here yet; start the server once, or check the configured path"
        )


class StoreCorruptError(StoreError):
    """The file is damaged. It only describes cached KV, which can be computed again."""

    def __init__(self, path: Path, detail: str) -> None:
        super().__init__(
            path,
            f"the metadata store is damaged ({detail}). It is only a cache: move the file and its "
            f"journal away, or run `kvshare evict --all --yes --store {path.parent}`, then start again",
        )
        self.detail = detail


class StoreMismatchError(StoreError):
    """The file was written for another model, or by a newer version."""

    def __init__(self, path: Path, found: str, expected: str) -> None:
        super().__init__(
            path,
            f"the store was written for {found}, this process expects {expected}. Set another "
            "store path, or restore the old settings or version, or run "
            f"`kvshare evict --all --yes --store {path.parent}` to drop what is stored",
        )
        self.found = found


class StoreForeignError(StoreMismatchError):
    """The file is another program's database; KVShare does not change it."""


class StoreLockedError(StoreError):
    """Another process has the file open; only one may write."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            path,
            "another process has this store open. Stop that server, ask it through its admin "
            "API (--url), or give this one another store path",
        )


class StoreReadOnlyError(StoreError):
    """The tree was opened with `read_only=True`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "opened read-only; open it without read_only to change it")


class StoreUnavailableError(StoreError):
    """The operating system or SQLite failed; the change was rolled back."""

    def __init__(self, path: Path, detail: str) -> None:
        super().__init__(
            path,
            f"the store cannot be used now ({detail}); nothing was changed. Check disk space and permissions",
        )
        self.detail = detail
