"""
Several log files -> one stream of requests in time order, no turn before the turns it builds on.

    read    every row goes to a temporary file once, every request to a record that says where (spill.py)
    sort 1  by conversation and turn: no request is earlier than the turns before it, whatever its clock says
    sort 2  by time, then by place in the files

Where a log names conversations and no turns, those are counted after sort 1, in the files' order.
Where a request has no time, it has that of the request before it in its file. Where none before it has one
either, the files' order stands and it comes before everything that has a time. Such conversations follow each
other whole; with `interleave` that many of them are open at once and take turns, in rotation, or drawn with
`seed`. Memory holds neither texts nor records: both are on disk.
"""

from __future__ import annotations

import random
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from hashlib import blake2b
from itertools import groupby, islice
from operator import attrgetter, itemgetter
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

from kvshare.errors import LogError
from kvshare.replay.readers import FORMATS, ReadReport, read_file
from kvshare.replay.requests import LoggedRequest
from kvshare.replay.spill import Spill, read_records, sort_records, write_records

_BY_ORDER = (1 << 32) - 1  # behind all turns that have a number
_UNTIMED = float("-inf")
_BY_CONVERSATION = struct.Struct(">16sIQdQI")  # conversation, turn, sequence, time, offset, number
_BY_TIME = struct.Struct(">QQIQQI")  # time, anchor, turn, sequence, offset, number
_PLACE = struct.Struct(">QII")  # offset, number, turn
_TELL_EVERY = 1000  # requests

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
        self.num_requests = 0
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
            self.num_requests = write_records(self._order, islice(places, self._limit))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def __len__(self) -> int:
        return self.num_requests

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
