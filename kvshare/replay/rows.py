"""
One row per request and policy: the numbers of a replay, and how they are written to Parquet and read.

All figures are functions of these rows, so that a resumed run finds the same figures. While a run is not
finished, its rows are in parts that are written whole or not at all, each with whole requests:

    OUT/checkpoint/rows-00000.parquet ...   the metadata says how far the run had come

What policies store is not saved, because it would be prompts: a resumed run shows them the beginning of the
log once more, unmeasured.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kvshare.errors import LogError
from kvshare.replay.requests import Outcome, TokenizedRequest
from kvshare.replay.results import Row
from kvshare.replay.whole_files import whole

if TYPE_CHECKING:
    from kvshare.replay.policies.base import CachePolicy

_PROGRESS = b"kvshare.progress"
SCHEMA = pa.schema(
    {  # of requests.parquet; `Outcome` in requests.py says what most of its columns are
        "index": pa.int64(),  # place in the stream, from 0
        "arm": pa.string(),  # the policy: "kvshare:min_run=32"
        "capacity_tokens": pa.int64(),  # null: infinite
        "namespace": pa.int32(),  # namespaces, users and conversations are numbered as they come
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
        "shifts": pa.list_(pa.int32()),
        "cross_user": pa.bool_(),
        "answered": pa.bool_(),
        "false_hit": pa.bool_(),
        "distance": pa.float32(),
        "reason": pa.string(),
        "num_refused": pa.int32(),
        "num_refused_generation": pa.int32(),
        "embedded": pa.bool_(),
        "num_stored_bytes": pa.int64(),
        "lookup_s": pa.float32(),
        "plan_s": pa.float32(),
        "observe_s": pa.float32(),  # all that the policy did: look up, plan, find losses, store
    }
)
_OF_OUTCOME = tuple(name for name in SCHEMA.names if hasattr(Outcome, name))
_LANGUAGE = re.compile(r"[A-Za-z][A-Za-z_()-]{0,23}( [A-Za-z()-]{1,23})?")


def numbering() -> defaultdict[str, int]:
    """Names -> numbers, in the order in which they first come: a log's names are private."""
    return defaultdict(itertools.count().__next__)


class RowMaker:
    """Makes rows; numbers users, conversations and namespaces over the whole stream."""

    def __init__(self) -> None:
        self._users, self._conversations, self._namespaces = numbering(), numbering(), numbering()

    def common(self, request: TokenizedRequest) -> Row:
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


def make_row(common: Row, policy: CachePolicy, outcome: Outcome, *, observe_s: float) -> Row:
    return {
        **common,
        "arm": policy.name,
        "capacity_tokens": policy.capacity_tokens,
        **{name: getattr(outcome, name) for name in _OF_OUTCOME},
        "observe_s": observe_s,
    }


def language_label(language: str) -> str:
    """Return the log's word for a language if it looks like one: no other text of a log is written."""
    return language if _LANGUAGE.fullmatch(language) else "other"


def write_rows(path: Path, rows: Sequence[Row], *, schema: pa.Schema = SCHEMA) -> None:
    """Rows into a Parquet file that appears whole or not at all."""
    with whole(path) as partial:
        pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), partial, compression="zstd")


def read_policy(
    path: Path, policy: str, capacity_tokens: int | None = None, *, columns: Sequence[str] | None = None
) -> pa.Table:
    """Return the rows of one policy with one store, in the stream's order."""
    capacity = pc.field("capacity_tokens")
    same_store = capacity.is_null() if capacity_tokens is None else capacity == capacity_tokens
    wanted = (pc.field("arm") == policy) & same_store
    # Reading ahead, in threads or into buffers, takes several times the memory and saves no time.
    table = pq.read_table(path, columns=columns, filters=wanted, use_threads=False, pre_buffer=False)
    return table.sort_by("index")


@dataclass(frozen=True, slots=True)
class Progress:
    """`digest` is of the data up to `num_requests`; `run` identifies the options and the files."""

    run: str
    num_requests: int = 0
    digest: str = ""
    num_resumed: int = 0
    wall_s: float = 0.0


class Checkpoint:
    def __init__(self, out: Path) -> None:
        self._folder = out / "checkpoint"

    @property
    def _parts(self) -> list[Path]:
        return sorted(self._folder.glob("rows-*.parquet"))

    @property
    def has_progress(self) -> bool:
        return bool(self._parts)

    def begin(self, run: str, *, resume: bool) -> Progress:
        """
        Return how far the interrupted run came; the beginning, if there is none or it shall not be resumed.

        Raises:  LogError if it was a run with other options or of other files
        """
        if not (resume and self.has_progress):
            self.clear()
            self._folder.mkdir(parents=True)
            return Progress(run)
        try:
            progress = Progress(**json.loads(pq.read_schema(self._parts[-1]).metadata[_PROGRESS]))
        except (OSError, ValueError, TypeError, LookupError) as exc:
            raise LogError("the checkpoint cannot be read; start again without --resume") from exc
        if progress.run != run:
            raise LogError(
                "the interrupted run had other options, settings, versions or files; "
                "start again without --resume"
            )
        return replace(progress, num_resumed=progress.num_resumed + 1)

    def save(self, progress: Progress, rows: Sequence[Row]) -> None:
        metadata = {_PROGRESS: json.dumps(asdict(progress))}
        path = self._folder / f"rows-{len(self._parts):05}.parquet"
        write_rows(path, rows, schema=SCHEMA.with_metadata(metadata))

    def join(self, path: Path) -> None:
        with whole(path) as partial, pq.ParquetWriter(partial, SCHEMA, compression="zstd") as writer:
            for part in self._parts:
                writer.write_table(pq.read_table(part))

    def clear(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
