"""
The settings that an index was built with. They are written beside it as a stamp.

With other fingerprints or another embedder the stored vectors are useless: an index with another stamp is
rebuilt, not read.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from vector_index.errors import IndexSchemaError

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class IndexSchema:
    """
    The settings that a stored index was built with. `dimension` 0 means fingerprints only, no embeddings.
    """

    kgram: int
    window: int
    max_fingerprints: int
    embedder: str = ""
    dimension: int = 0
    version: int = SCHEMA_VERSION

    def as_stamp(self) -> dict[str, object]:
        """The schema as it is written beside the index."""
        return asdict(self)

    def check(self, found: object) -> None:
        """
        Compare with a stamp read back from an index.

        Raises:  IndexSchemaError, naming the first field that differs, or the missing stamp
        """
        if not isinstance(found, dict):
            raise IndexSchemaError("the index has no schema stamp; rebuild it")
        for name, value in self.as_stamp().items():
            if found.get(name) != value:
                raise IndexSchemaError(f"the index has {name} {found.get(name)!r}, expected {value!r}")


def write_stamp(path: Path, schema: IndexSchema) -> None:
    """Write a schema as JSON, atomically."""
    half_written = path.with_suffix(".tmp")
    half_written.write_text(json.dumps(schema.as_stamp()), encoding="utf-8")
    os.replace(half_written, path)


def read_stamp(path: Path) -> object:
    """The stamp that `write_stamp` wrote; None if it is missing or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
