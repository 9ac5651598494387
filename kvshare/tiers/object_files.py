"""The names of objects below a tier's folder, and what their sizes say. `disk_tier.py` shows the folders."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from delta_tree import Segment, SegmentId
from kvshare.tiers.files import Files
from kvshare.tiers.kv_object import MOST_HEADER_BYTES, PAGE_BYTES

SUFFIX, UNFINISHED = ".kv", ".kv.tmp"
OBJECT_NAME = re.compile(r"([0-9a-f]{16})\.kv")
FORM_NAME = re.compile(r"[0-9a-f]{16}")


def object_path(folder: Path, segment_id: SegmentId) -> Path:
    """Return the path of a segment in the folder of its form."""
    digits = f"{segment_id:016x}"
    return folder / digits[-2:] / f"{digits}{SUFFIX}"


def listed(folder: Path, files: Files) -> Iterator[tuple[Path, str, SegmentId | None, int]]:
    """
    Yield folder, name, id and bytes of each object in the folder of a form; unfinished ones have no id.

    A path of each would double what a start takes.
    """
    for name_of_shelf, _, is_folder in list(files.entries(folder)):
        shelf = folder / name_of_shelf
        for name, num_bytes, _ in files.entries(shelf) if is_folder else ():
            if (match := OBJECT_NAME.fullmatch(name)) is not None:
                yield shelf, name, SegmentId(int(match[1], 16)), num_bytes
            elif name.endswith(UNFINISHED):
                yield shelf, name, None, num_bytes


def may_hold(file_bytes: int, segment: Segment) -> bool:
    """Return whether a file of this size may be the segment's object: its bytes, and pages of a header."""
    rest = file_bytes - segment.num_bytes
    return 0 < rest <= MOST_HEADER_BYTES and rest % PAGE_BYTES == 0
