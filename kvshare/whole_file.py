"""Replaces a file as a whole, so that a crash leaves the old one or the new one."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, raw: bytes) -> None:
    """Write a file that only this user may read. Raises OSError, and leaves the old one then."""
    new = path.with_name(f"{path.name}.new")
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
