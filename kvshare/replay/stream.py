"""
Several log files -> one stream of requests in time order, no turn before the turns it builds on.

    read    every row goes to a temporary file once, every request to a record that says where
    sort 1  by conversation and turn: no request is earlier than the turns before it, whatever its clock says
    sort 2  by time, then by place in the files

Where a log names conversations and no turns, those are counted after sort 1, in the files' order.
Where a request has no time, it has that of the request before it in its file. Where none before it has one
either, the files' order stands and it comes before everything that has a time. Such conversations follow each
other whole; with `interleave` that many of them are open at once and take turns, in rotation, or drawn with
`seed`. Memory holds neither texts nor records: both are on disk,
in a folder that only its owner may read, and go with it.
"""

from __future__ import annotations

import json
import random
import struct
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from hashlib import blake2b
from itertools import groupby, islice
from operator import attrgetter, itemgetter
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np

from kvshare.errors import LogError
from kvshare.replay.readers import FORMATS, LoggedRow, ReadReport, Turn, read_file
from kvshare.replay.requests import LoggedRequest

_BY_ORDER = (1 << 32) - 1  # behind all turns that have a number
_UNTIMED = float("-inf")
_BY_CONVERSATION = struct.Struct(">16sIQdQI")  # conversation, turn, sequence, time, offset, number
_BY_TIME = struct.Struct(">QQIQQI")  # time, anchor, turn, sequence, offset, number
_PLACE = struct.Struct(">QII")  # offset, number, turn
_TELL_EVERY = 1000  # requests
_CHUNK_RECORDS = 4096
_NAMES = tuple(field.name for field in fields(LoggedRequest))
_TUPLES = frozenset({"messages", "token_ids", "block_hashes"})

_T = TypeVar("_T")


class _Key(NamedTuple):
    """Where a request belongs in the stream, and where its row lies. `number` counts within the row."""

    time: int
    anchor: int
    turn: int
    sequence: int
    offset: int
    number: int


class RequestStream:
    """
    `with RequestStream(paths) as stream:` reads all files, then gives the requests as often as asked for.

    `limit`: only so many. Raises LogError on entering for a file that cannot be replayed. `reading` is told
    how many requests were read so far, `report` says what could not be read.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        format_name: str | None = None,
        interleave: int = 1,
        seed: int | None = None,
        limit: int | None = None,
        folder: Path | None = None,
        reading: Callable[[int], None] = lambda num_read: None,
    ) -> None:
        self.report = ReadReport()
        self._num_requests = 0
        self._paths = paths
        self._format_name = format_name
        self._interleave = max(1, interleave)
        self._seed = seed
        self._limit = limit
        self._parent = folder
        self._reading = reading
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            name = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvshare-", dir=self._parent))
            self._folder = Path(name)
            self._spill = Spill(self._folder / "rows")
            stack.callback(self._spill.close)
            by_conversation = self._sorted("conversations", _BY_CONVERSATION, self._read())
            by_time = self._sorted("times", _BY_TIME, self._never_before_earlier_turns(by_conversation))
            ordered = self._interleaved(map(_Key._make, by_time))
            self._order = self._folder / "order"
            places = (_PLACE.pack(key.offset, key.number, key.turn) for key in ordered)
            self._num_requests = write_records(self._order, islice(places, self._limit))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def __len__(self) -> int:
        return self._num_requests

    def __iter__(self) -> Iterator[LoggedRequest]:
        for record in read_records(self._order, _PLACE.size):
            offset, number, turn = _PLACE.unpack(record)
            row = self._spill.read(offset)
            yield replace(row.request, turn=turn) if row.turn_by_order else row.at(number)

    def _sorted(
        self, name: str, record: struct.Struct, records: Iterable[bytes]
    ) -> Iterator[tuple[Any, ...]]:
        path = self._folder / name
        write_records(path, records)
        sort_records(path, record.size)
        return map(record.unpack, read_records(path, record.size))

    def _read(self) -> Iterator[bytes]:
        sequence = 0
        for path, source in zip(self._paths, _sources(self._paths), strict=True):
            time_s = _UNTIMED
            rows = read_file(path, self.report, format_name=self._format_name, source=source)
            for row in rows:
                self._refuse_lengths(source)
                offset = self._spill.write(row)
                conversation = blake2b(row.request.conversation.encode(), digest_size=16).digest()
                for number in range(row.num_requests):
                    turn, own_time_s = row.turn_and_time(number)
                    time_s = time_s if own_time_s is None else own_time_s
                    turn = _BY_ORDER if row.turn_by_order else turn or 0
                    yield _BY_CONVERSATION.pack(conversation, turn, sequence, time_s, offset, number)
                    sequence += 1
                    if sequence % _TELL_EVERY == 0:
                        self._reading(sequence)

    def _refuse_lengths(self, source: str) -> None:
        if not FORMATS[self.report.formats[source]].has_content:
            raise LogError(
                f"{source} tells only lengths of requests: without content, nothing can be said of hits"
            )

    def _never_before_earlier_turns(self, records: Iterable[tuple[Any, ...]]) -> Iterator[bytes]:
        """
        A conversation's times never decrease; equal ones stand in the order of the files, then turns.

        Turns that have no number yet go on from the one before.
        """
        for _, turns in groupby(records, key=itemgetter(0)):
            latest, last = _UNTIMED, -1
            first: int | None = None
            turn = -1
            for _, told, sequence, time_s, offset, number in turns:
                turn = turn + 1 if told == _BY_ORDER else told
                latest, last = max(latest, time_s), max(last, sequence)
                first = sequence if first is None else first
                together = latest == _UNTIMED and self._interleave > 1
                anchor = first if together else last
                yield _BY_TIME.pack(_sortable(latest), anchor, turn, sequence, offset, number)

    def _interleaved(self, keys: Iterator[_Key]) -> Iterator[_Key]:
        untimed = _sortable(_UNTIMED)
        for is_untimed, stretch in groupby(keys, key=lambda key: key.time == untimed):
            if is_untimed and self._interleave > 1:
                waiting = (iter(list(turns)) for _, turns in groupby(stretch, key=attrgetter("anchor")))
                draw = None if self._seed is None else random.Random(self._seed)
                yield from take_turns(waiting, self._interleave, draw)
            else:
                yield from stretch


def take_turns(waiting: Iterator[Iterator[_T]], num_open: int, draw: random.Random | None) -> Iterator[_T]:
    """What `num_open` of these have, one of each in rotation or drawn; one that has ended makes room."""
    speaking: list[Iterator[_T]] = []
    place = 0
    while True:
        speaking += islice(waiting, num_open - len(speaking))
        if not speaking:
            return
        place = place % len(speaking) if draw is None else draw.randrange(len(speaking))
        if (item := next(speaking[place], None)) is None:
            del speaking[place]
        else:
            yield item
            place += 1


def _sources(paths: Sequence[Path]) -> list[str]:
    """File names, told apart where two are equal; no folders, which are nobody's business."""
    seen: dict[str, int] = {}
    names = []
    for path in paths:
        seen[path.name] = number = seen.get(path.name, 0) + 1
        names.append(path.name if number == 1 else f"{path.name} ({number})")
    return names


def _sortable(time_s: float) -> int:
    """Unsigned, in the same order as the times."""
    (bits,) = struct.unpack(">Q", struct.pack(">d", time_s + 0.0))
    number: int = bits
    return number ^ 0xFFFF_FFFF_FFFF_FFFF if number >> 63 else number | 1 << 63


class Spill:
    """
    Rows in a temporary file, to be read again in another order: a conversation is written once.

    Rows by the offset that `write` returned; the last few are kept parsed, up to a number of bytes.
    """

    def __init__(self, path: Path, *, max_cached_bytes: int = 64 << 20) -> None:
        self._file = path.open("wb", buffering=1 << 20)
        self._reader = path.open("rb", buffering=1 << 14)  # jumps about: a large buffer would be read in vain
        self._end = 0
        self._max_cached_bytes = max_cached_bytes
        self._cached_bytes = 0
        self._cache: OrderedDict[int, tuple[int, LoggedRow]] = OrderedDict()

    def write(self, row: LoggedRow) -> int:
        """Append; returns where."""
        line = _encode(row)
        self._file.write(line)
        offset, self._end = self._end, self._end + len(line)
        return offset

    def read(self, offset: int) -> LoggedRow:
        """The row that was written there."""
        if (cached := self._cache.get(offset)) is not None:
            self._cache.move_to_end(offset)
            return cached[1]
        self._file.flush()
        self._reader.seek(offset)
        line = self._reader.readline()
        row = _decode(line)
        self._cache[offset] = (len(line), row)
        self._cached_bytes += len(line)
        while self._cached_bytes > self._max_cached_bytes and len(self._cache) > 1:
            _, (num_bytes, _) = self._cache.popitem(last=False)
            self._cached_bytes -= num_bytes
        return row

    def close(self) -> None:
        self._reader.close()
        self._file.close()


def _encode(row: LoggedRow) -> bytes:
    request = row.request
    values = {name: getattr(request, name) for name in _NAMES}
    values["turns"] = [(turn.num_messages, turn.time_s) for turn in row.turns]
    values["turn_by_order"] = row.turn_by_order or None
    given = {name: value for name, value in values.items() if value is not None and value != []}
    return json.dumps(given, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _decode(line: bytes) -> LoggedRow:
    values: dict[str, Any] = json.loads(line)
    turns = tuple(Turn(num_messages, time_s) for num_messages, time_s in values.pop("turns", ()))
    turn_by_order = values.pop("turn_by_order", False)
    for name in _TUPLES & values.keys():
        values[name] = tuple(values[name])
    return LoggedRow(LoggedRequest(**values), turns, turn_by_order)


def write_records(path: Path, records: Iterable[bytes]) -> int:
    """Returns how many."""
    number = 0
    with path.open("wb", buffering=1 << 20) as file:
        for record in records:
            file.write(record)
            number += 1
    return number


def sort_records(path: Path, size: int) -> None:
    """As bytes, in place: memory holds as much of the file as the system has room for."""
    if path.stat().st_size:
        np.memmap(path, dtype=f"V{size}", mode="r+").sort()


def read_records(path: Path, size: int) -> Iterator[bytes]:
    """In the file's order."""
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(size * _CHUNK_RECORDS):
            for position in range(0, len(chunk), size):
                yield chunk[position : position + size]
