"""The files of a store on disk, for administrators: needs neither a model nor a server."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from delta_tree import SegmentId
from kvshare.tiers import KV_FOLDER, VLLM_KV_FOLDER
from kvshare.tiers.files import Files, remove_empty
from kvshare.tiers.kv_object import ObjectError, verify
from kvshare.tiers.object_files import FORM_NAME, OBJECT_NAME, listed, object_path


@dataclass(frozen=True, slots=True)
class Damage:
    """A file that is not what it should be."""

    file: str  # below the folder of the store
    problem: str


@dataclass(frozen=True, slots=True)
class VerifiedStore:
    """How much was read, and what is damaged."""

    num_objects: int
    num_bytes: int
    seconds: float
    damaged: tuple[Damage, ...]

    def __add__(self, other: VerifiedStore) -> VerifiedStore:
        """Add up two stores that were verified one after the other."""
        return VerifiedStore(
            self.num_objects + other.num_objects,
            self.num_bytes + other.num_bytes,
            self.seconds + other.seconds,
            self.damaged + other.damaged,
        )


@dataclass(frozen=True, slots=True)
class CollectedFiles:
    """Files that belong to no stored prompt. They were deleted, unless it was a dry run."""

    dry_run: bool
    num_files: int
    num_bytes: int


class StoredFiles:
    """The objects of a store. `files`: access to the disk; `name`: of the objects' folder in `store`."""

    def __init__(self, store: Path, files: Files | None = None, *, name: str = KV_FOLDER) -> None:
        self._store, self._root = store, store / name
        self._files = files or Files()

    def sizes(self) -> dict[Path, int]:
        """Return the bytes of each file of the store, also of unfinished ones."""
        by_path = {}
        for path in self._all():
            with suppress(FileNotFoundError):  # a running server deleted it meanwhile
                by_path[path] = path.lstat().st_size
        return by_path

    def verified(self) -> VerifiedStore:
        """Read every object whole, and compare it with its checks. A server may run meanwhile."""
        began, num_objects, num_bytes = time.perf_counter(), 0, 0
        damaged: list[Damage] = []
        for path, size in self.sizes().items():
            match = OBJECT_NAME.fullmatch(path.name)
            if match is None:
                continue  # unfinished: nothing refers to it
            try:
                header = verify(self._files, path)
                if header.segment.segment_id != int(match[1], 16):
                    raise ObjectError("it is another segment")
            except FileNotFoundError:
                continue
            except (ObjectError, OSError) as exc:
                problem = str(exc) if isinstance(exc, ObjectError) else exc.strerror or type(exc).__name__
                damaged.append(Damage(str(path.relative_to(self._store)), problem))
            num_objects += 1
            num_bytes += size
        return VerifiedStore(num_objects, num_bytes, time.perf_counter() - began, tuple(damaged))

    def collect(self, wanted: Collection[SegmentId], *, dry_run: bool) -> CollectedFiles:
        """Delete the files that belong to none of these segments. No server may have the store open."""
        names = {object_path(self._root, segment_id).name for segment_id in wanted}
        litter = {path: size for path, size in self.sizes().items() if path.name not in names}
        if not dry_run:
            self._delete(litter)
        return CollectedFiles(dry_run, len(litter), sum(litter.values()))

    def drop(self, segment_ids: Iterable[SegmentId]) -> None:
        """Delete the objects of these segments. No server may have the store open."""
        entries = list(segment_ids)
        self._delete(object_path(folder, entry) for folder in self._forms() for entry in entries)

    @classmethod
    def of_vllm(cls, folder: Path) -> list[Self]:
        """List the objects of vLLMs in this folder, by data-parallel rank; empty if no vLLM has any here."""
        places = [folder, *sorted(folder.glob("rank-*"))]
        return [cls(each, name=VLLM_KV_FOLDER) for each in places if (each / VLLM_KV_FOLDER).is_dir()]

    def _all(self) -> Iterator[Path]:
        for folder in self._forms():
            yield from (shelf / name for shelf, name, _, _ in listed(folder, self._files))

    def _forms(self) -> list[Path]:
        entries = list(self._files.entries(self._root))
        return [
            self._root / name for name, _, is_folder in entries if is_folder and FORM_NAME.fullmatch(name)
        ]

    def _delete(self, paths: Iterable[Path]) -> None:
        for path in paths:
            self._files.delete(path)
        for folder in self._forms():
            remove_empty(self._files, folder)
