"""
Remembers over restarts of the proxy which replicas have a disk, in a file next to the metadata store.

Both may be restarted at once, and a vLLM that loads a large model answers much later than the proxy. What
its disk has is waited for as long as that takes. Without the file, `vllm.lost_after_s` decides. All methods
block.
"""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

from kvshare.safe_logging import class_and_place
from kvshare.whole_file import write_whole

log = logging.getLogger(__name__)

DISKS_FILE = "disks.json"


class KnownDisks:
    """Names of replicas. Thread-safe."""

    def __init__(self, folder: str | None) -> None:
        """`folder`: of the store; None: nothing is kept."""
        self._path = None if folder is None else Path(folder) / DISKS_FILE
        self._lock = threading.Lock()
        self.names = self._read()

    def note(self, replica: str, *, has_disk: bool) -> None:
        """A connected replica has a disk, or none. A failure to write is logged only."""
        with self._lock:
            self._note(replica, has_disk=has_disk)

    def _note(self, replica: str, *, has_disk: bool) -> None:
        names = self.names | {replica} if has_disk else self.names - {replica}
        if names == self.names:
            return
        self.names = names
        if self._path is None:
            return
        try:
            write_whole(self._path, json.dumps(sorted(names)).encode())
        except OSError as exc:
            log.warning(
                "cannot remember which replicas have a disk: %s", exc.strerror or class_and_place(exc)
            )

    def _read(self) -> frozenset[str]:
        """Nothing, if the file is missing or damaged."""
        try:
            names = json.loads(self._path.read_bytes()) if self._path is not None else []
        except (OSError, ValueError):
            return frozenset()
        is_valid = isinstance(names, list) and all(isinstance(name, str) for name in names)
        return frozenset(names) if is_valid else frozenset()
