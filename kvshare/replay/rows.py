"""
One row a request and arm: what is kept of a replay, as numbers, and how it goes into Parquet and comes back.

All measures are functions of these rows, so that a resumed run, or a later one, finds the same from the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from kvshare.replay.arms.base import Arm
from kvshare.replay.requests import Outcome, TokenizedRequest
from kvshare.replay.results import Row

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
_LANGUAGE = re.compile(r"[A-Za-z][A-Za-z_()-]{0,23}( [A-Za-z()-]{1,23})?")


class Numbering:
    """Names -> numbers, in the order they first come: logs' names are nobody's business."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def __call__(self, name: str) -> int:
        return self._numbers.setdefault(name, len(self._numbers))

    def __len__(self) -> int:
        return len(self._numbers)


class RowMaker:
    """Makes rows; numbers users, conversations and namespaces over the whole stream."""

    def __init__(self) -> None:
        self.users = Numbering()
        self.conversations = Numbering()
        self.namespaces = Numbering()

    def common(self, request: TokenizedRequest) -> Row:
        """What the rows of all arms have in common."""
        logged = request.logged
        return {
            "index": request.index,
            "namespace": self.namespaces(logged.namespace),
            "user": None if logged.user is None else self.users(logged.user),
            "conversation": self.conversations(logged.conversation),
            "turn": logged.turn,
            "language": language_label(logged.language),
            "time_s": request.time_s,
            "num_tokens": request.num_tokens,
            "num_answer_tokens": len(request.answer_ids),
        }


def make_row(common: Row, arm: Arm, outcome: Outcome, *, observe_s: float) -> Row:
    """What an arm made of a request, with everything as Parquet will give it back."""
    distance = None if outcome.distance is None else float(np.float32(outcome.distance))
    return {
        **common,
        "arm": arm.name,
        "capacity_tokens": arm.capacity_tokens,
        "num_hit": outcome.num_hit,
        "num_exact": outcome.num_exact,
        "num_repaired": outcome.num_repaired,
        "num_copies": len(outcome.shifts),
        "num_donors": outcome.num_donors,
        "shifts": list(outcome.shifts),
        "cross_user": outcome.cross_user,
        "answered": bool(outcome.details.get("answered", 0)),
        "false_hit": outcome.false_hit,
        "distance": distance,
        "reason": outcome.reason,
        "num_refused": int(outcome.details.get("num_refused", 0)),
        "num_refused_generation": int(outcome.details.get("num_refused_generation", 0)),
        "embedded": bool(outcome.details.get("embedded", 0)),
        "num_stored_bytes": outcome.num_stored_bytes,
        "lookup_s": outcome.lookup_s,
        "plan_s": outcome.plan_s,
        "observe_s": observe_s,
    }


def language_label(language: str) -> str:
    """The log's word for a language, if it looks like one: nothing else of a log is written as text."""
    return language if _LANGUAGE.fullmatch(language) else "other"


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Rows into a Parquet file that appears whole or not at all."""
    partial = path.with_suffix(".partial")
    pq.write_table(pa.Table.from_pylist(list(rows), schema=SCHEMA), partial, compression="zstd")
    partial.replace(path)


def read_rows(path: Path, *, batch_size: int = 4096) -> Iterator[Row]:
    """The rows of a file, in order, a batch in memory at a time."""
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=batch_size):
            yield from batch.to_pylist()


def join_files(parts: Sequence[Path], path: Path) -> None:
    """All parts, one after the other, as one file."""
    partial = path.with_suffix(".partial")
    with pq.ParquetWriter(partial, SCHEMA, compression="zstd") as writer:
        for part in parts:
            with pq.ParquetFile(part) as file:
                for batch in file.iter_batches(batch_size=65_536):
                    writer.write_batch(batch)
    partial.replace(path)
