"""
How far a replay came, so that an interrupted one can go on: rows in parts, and a small state that names them.

    OUT/checkpoint/rows-00000.parquet ...   whole requests only
    OUT/checkpoint/state.json               written last, replaced whole

What the arms hold is not kept (it would be prompts); on resuming they observe the log's beginning once more,
unmeasured.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from kvshare.errors import LogError
from kvshare.replay.results import CHECKPOINT_FOLDER, Row
from kvshare.replay.rows import join_files, read_rows, write_rows

_STATE_FILE = "state.json"


@dataclass(frozen=True, slots=True)
class Progress:
    """`digest` is that of the data up to `num_requests`; `run` names the config and the files."""

    run: str
    num_requests: int = 0
    num_parts: int = 0
    digest: str = ""
    num_resumed: int = 0
    wall_s: float = 0.0


class Checkpoint:
    """The checkpoint folder of one run."""

    def __init__(self, out: Path) -> None:
        self._folder = out / CHECKPOINT_FOLDER

    @property
    def has_progress(self) -> bool:
        """Whether there is anything to resume."""
        return (self._folder / _STATE_FILE).is_file()

    def begin(self, run: str) -> Progress:
        """Forget whatever was there and start anew."""
        self.clear()
        self._folder.mkdir(parents=True)
        return Progress(run)

    def resume(self, run: str) -> Progress:
        """
        How far the interrupted run came; nowhere, if there is none.

        Raises:  LogError if it was a run with other options or of other files
        """
        if not self.has_progress:
            return self.begin(run)
        try:
            state = self._folder / _STATE_FILE
            progress = Progress(**json.loads(state.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as exc:
            raise LogError("the checkpoint cannot be read; start without --resume") from exc
        if progress.run != run:
            raise LogError(
                "the interrupted run had other options, settings, versions or files; start without --resume"
            )
        return progress

    def check_same_data(self, progress: Progress, digest: str) -> None:
        """Raises LogError if this is not the digest of the data that the interrupted run had seen."""
        if digest != progress.digest:
            raise LogError("the log is another than the interrupted run's; start without --resume")

    def save(self, progress: Progress, rows: list[Row]) -> None:
        """Add a part, then say so."""
        if rows:
            write_rows(self._part(progress.num_parts - 1), rows)
        partial = self._folder / "state.partial"
        partial.write_text(json.dumps(asdict(progress)), encoding="utf-8")
        partial.replace(self._folder / _STATE_FILE)

    def rows(self, progress: Progress) -> Iterator[list[Row]]:
        """The rows so far, request by request."""
        for number in range(progress.num_parts):
            for _, rows in groupby(read_rows(self._part(number)), key=itemgetter("index")):
                yield list(rows)

    def join(self, progress: Progress, path: Path) -> None:
        """All rows as one file."""
        join_files([self._part(number) for number in range(progress.num_parts)], path)

    def clear(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _part(self, number: int) -> Path:
        return self._folder / f"rows-{number:05}.parquet"
