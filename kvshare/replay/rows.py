"""
One row a request and arm: what is kept of a replay, as numbers, and how it goes into Parquet and comes back.

All measures are functions of these rows, so that a resumed run, or a later one, finds the same from the file.
How far a replay came lies in parts of it, each with whole requests only, that appear whole or not at all:

    OUT/checkpoint/rows-00000.parquet ...   in its metadata, how far the run had come with it

What the arms hold is not kept (it would be prompts); on resuming they observe the log's beginning once more,
unmeasured.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kvshare.errors import LogError
from kvshare.replay.arms.base import Arm
from kvshare.replay.requests import Outcome, TokenizedRequest
from kvshare.replay.results import Row
from kvshare.replay.whole_files import whole

_PROGRESS = b"kvshare.progress"
SCHEMA = pa.schema(
    {
        "index": pa.int64(),  # place in the stream, from 0
        "arm": pa.string(),  # "kvshare:min_run=32"
        "capacity_tokens": pa.int64(),  # null: infinite
        "namespace": pa.int32(),  # this, users and conversations are numbered in the order they first came
        "user": pa.int32(),  # null: the log does not name users
        "conversation": pa.int32(),
        "turn": pa.int32(),  # null: the log does not say
        "language": pa.string(),
        "time_s": pa.float64(),
        "num_tokens": pa.int32(),
        "num_answer_tokens": pa.int32(),
        "num_hit": pa.int32(),
        "num_exact": pa.int32(),
        "num_repaired": pa.int32(),
        "num_copies": pa.int32(),
        "num_donors": pa.int32(),
        "shifts": pa.list_(pa.int32()),  # of the copies, in tokens, signed
        "cross_user": pa.bool_(),  # null: the log does not tell
        "answered": pa.bool_(),  # by a response cache
        "false_hit": pa.bool_(),
        "distance": pa.float32(),  # cosine, to the nearest earlier prompt; null where the arm does not look
        "reason": pa.string(),  # why nothing or no more was shared; null: nothing was refused
        "num_refused": pa.int32(),  # tokens a gate refused, that the arm's candidates had
        "num_refused_generation": pa.int32(),  # of these, taken if only the generation did not matter
        "embedded": pa.bool_(),  # for the look-up; the time it took is no part of it
        "num_stored_bytes": pa.int64(),  # in the arm's store, after this request
        "lookup_s": pa.float32(),
        "plan_s": pa.float32(),
        "observe_s": pa.float32(),  # all the arm did: look up, plan, tell what gates cost, store
    }
)
_OF_OUTCOME = tuple(name for name in SCHEMA.names if hasattr(Outcome, name))
_LANGUAGE = re.compile(r"[A-Za-z][A-Za-z_()-]{0,23}( [A-Za-z()-]{1,23})?")


def numbering() -> defaultdict[str, int]:
    """Names -> numbers, in the order they first come: logs' names are nobody's business."""
    return defaultdict(itertools.count().__next__)


class RowMaker:
    """Makes rows; numbers users, conversations and namespaces over the whole stream."""

    def __init__(self) -> None:
        self._users, self._conversations, self._namespaces = numbering(), numbering(), numbering()

    def common(self, request: TokenizedRequest) -> Row:
        """What the rows of all arms have in common."""
        logged = request.logged
        return {
            "index": request.index,
            "namespace": self._namespaces[logged.namespace],
            "user": None if logged.user is None else self._users[logged.user],
            "conversation": self._conversations[logged.conversation],
            "turn": logged.turn,
            "language": language_label(logged.language),
            "time_s": request.time_s,
            "num_tokens": request.num_tokens,
            "num_answer_tokens": len(request.answer_ids),
        }


def make_row(common: Row, arm: Arm, outcome: Outcome, *, observe_s: float) -> Row:
    """What an arm made of a request."""
    return {
        **common,
        "arm": arm.name,
        "capacity_tokens": arm.capacity_tokens,
        **{name: getattr(outcome, name) for name in _OF_OUTCOME},
        "observe_s": observe_s,
    }


def language_label(language: str) -> str:
    """The log's word for a language, if it looks like one: nothing else of a log is written as text."""
    return language if _LANGUAGE.fullmatch(language) else "other"


def write_rows(path: Path, rows: Sequence[Row], *, schema: pa.Schema = SCHEMA) -> None:
    """Rows into a Parquet file that appears whole or not at all."""
    with whole(path) as partial:
        pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), partial, compression="zstd")


def read_arm(
    path: Path, arm: str, capacity_tokens: int | None = None, *, columns: Sequence[str] | None = None
) -> pa.Table:
    """The rows of one arm with one store, in the stream's order."""
    capacity = pc.field("capacity_tokens")
    same_store = capacity.is_null() if capacity_tokens is None else capacity == capacity_tokens
    wanted = (pc.field("arm") == arm) & same_store
    # Reading ahead, in threads or into buffers, takes several times the memory and saves no time.
    table = pq.read_table(path, columns=columns, filters=wanted, use_threads=False, pre_buffer=False)
    return table.sort_by("index")


@dataclass(frozen=True, slots=True)
class Progress:
    """`digest` is that of the data up to `num_requests`; `run` names the config and the files."""

    run: str
    num_requests: int = 0
    digest: str = ""
    num_resumed: int = 0
    wall_s: float = 0.0


class Checkpoint:
    """The checkpoint folder of one run."""

    def __init__(self, out: Path) -> None:
        self._folder = out / "checkpoint"

    @property
    def has_progress(self) -> bool:
        """Whether there is anything to resume."""
        return bool(self._parts)

    @property
    def _parts(self) -> list[Path]:
        return sorted(self._folder.glob("rows-*.parquet"))

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
            progress = Progress(**json.loads(pq.read_schema(self._parts[-1]).metadata[_PROGRESS]))
        except (OSError, ValueError, TypeError, LookupError) as exc:
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

    def save(self, progress: Progress, rows: Sequence[Row]) -> None:
        """Add a part."""
        metadata = {_PROGRESS: json.dumps(asdict(progress))}
        path = self._folder / f"rows-{len(self._parts):05}.parquet"
        write_rows(path, rows, schema=SCHEMA.with_metadata(metadata))

    def join(self, path: Path) -> None:
        """All parts, one after the other, as one file."""
        with whole(path) as partial, pq.ParquetWriter(partial, SCHEMA, compression="zstd") as writer:
            for part in self._parts:
                writer.write_table(pq.read_table(part))

    def clear(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)
