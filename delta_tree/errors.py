"""
Everything that can go wrong in the delta tree.

DeltaTreeError
  + InvalidTokensError      values that are not token ids
  + EditRangeError          a span or an edit reaches past the prompt it is applied to
  + InvalidNodeError        a draft or node that is not valid; nothing was changed
  + UnknownNodeError        no node with this id (it may have been evicted)
  + UnknownSegmentError     no segment with this id (it may have been freed)
  + PinnedNodeError         a pinned node is evicted only after `unpin`, or by a purge of its namespace
  + MetadataStoreError      a problem of the metadata file; it has the file's path
    - StoreMissingError     read-only open of a file that is not there
    - StoreCorruptError     the file is damaged; it only describes cached KV, which can be computed again
    - StoreMismatchError    the file was written for another model, or by a newer version
      . StoreForeignError   the file is the database of another program
    - StoreNotEmptyError    the file to which a tree in memory should be written has prompts already
    - StoreLockedError      another process has the file open; only one may write
    - StoreReadOnlyError    a change of a tree that was opened read-only
    - StoreUnavailableError the system or SQLite failed (disk full, permissions); nothing was changed

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
    def __init__(self, node_id: int) -> None:
        super().__init__(f"no node {node_id} in the tree; it may have been evicted or purged")


class UnknownSegmentError(DeltaTreeError, LookupError):
    def __init__(self, segment_id: int) -> None:
        super().__init__(f"no segment {segment_id} in the tree; its last node may be gone")


class PinnedNodeError(DeltaTreeError):
    def __init__(self, node_id: int) -> None:
        super().__init__(f"node {node_id} is pinned; unpin it first, or purge its namespace")


class MetadataStoreError(DeltaTreeError):
    """A problem of the metadata file at `path`; the message of each subclass says what to do."""

    message = "{detail}"

    def __init__(self, path: Path, detail: str = "") -> None:
        super().__init__(f"{path}: {self.message.format(detail=detail, folder=path.parent)}")
        self.path = path
        self.detail = detail


class StoreMissingError(MetadataStoreError):
    message = "there is no store here yet; start the server once, or check the configured path"


class StoreCorruptError(MetadataStoreError):
    message = (
        "the metadata store is damaged ({detail}). It is only a cache: move the file and its "
        "journal away, or run `kvshare evict --all --yes --store {folder}`, then start again"
    )


class StoreMismatchError(MetadataStoreError):
    message = (
        "the store was written for {detail}. Set another store path, or restore the old settings or version, "
        "or run `kvshare evict --all --yes --store {folder}` to drop what is stored"
    )

    def __init__(self, path: Path, found: str, expected: str) -> None:
        super().__init__(path, f"{found}, this process expects {expected}")
        self.found = found


class StoreNotEmptyError(MetadataStoreError):
    message = "the store has prompts already; move the file and its journal away first"


class StoreForeignError(StoreMismatchError):
    """The file is another program's database; KVShare does not change it."""


class StoreLockedError(MetadataStoreError):
    message = (
        "another process has this store open. Stop that server, ask it through its admin API (--url), "
        "or give this one another store path"
    )


class StoreReadOnlyError(MetadataStoreError):
    message = "opened read-only; open it without read_only to change it"


class StoreUnavailableError(MetadataStoreError):
    message = "the store cannot be used now ({detail}); nothing was changed. Check disk space and permissions"
