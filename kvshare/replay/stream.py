"""
Several log files -> one stream of requests in time order, each turn after the turns it builds on.

Rows are written to a temporary SQLite database, with a record for each request, and the database sorts the
records. A request is never earlier than the turns before it, whatever its time. If a log names conversations
and no turns, turns are counted in the files' order.

A request without a time gets that of the request before it in its file. Requests before any time keep the
order of the files and come first. Their conversations follow each other whole; with `interleave` that many
of them are open at once and take turns, in rotation or drawn with `seed`. Texts and records are on disk
only, in a folder that only its owner may read, and are deleted at the end.
"""

import random
import sqlite3
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import KW_ONLY, dataclass, field, replace
from hashlib import blake2b
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Final, Self, TypeVar

from pydantic import TypeAdapter

from kvshare.logs import LoggedRow, ReadReport, read_file
from kvshare.logs.requests import LoggedRequest

_REPORT_EVERY = 1000  # requests
_MAX_CACHED_BYTES = 64 << 20  # of rows, as they stand on disk
_ROW: Final = TypeAdapter(LoggedRow)
_T = TypeVar("_T")
_IN_PLACE: Final = "SELECT row, number, turn FROM stream ORDER BY place"
_TABLES: Final = Path(__file__).with_suffix(".sql").read_text(encoding="utf-8")
# `untimed`: a number per conversation, for requests before any time.
_IN_ORDER: Final = """
    SELECT row, number, turn, iif(time_s IS NULL, first, NULL) AS untimed FROM placed
    ORDER BY time_s NULLS FIRST, iif(time_s IS NULL AND :interleave > 1, first, latest), turn, sequence
"""


@dataclass(eq=False)
class RequestStream:
    """
    `with RequestStream(paths) as stream:` reads all files; then the stream can be iterated any number of
    times.

    Raises LogError on entering for a file that cannot be replayed.
    """

    paths: Sequence[Path]
    _: KW_ONLY
    format_name: str | None = None
    interleave: int = 1
    seed: int | None = None
    limit: int | None = None  # only the first N requests
    folder: Path | None = None  # for the database; None: the system's temporary folder
    reading: Callable[[int], None] = lambda num_read: None  # called with the number of requests read so far
    report: ReadReport = field(init=False, default_factory=ReadReport)  # what could not be read
    _cache: OrderedDict[int, tuple[int, LoggedRow]] = field(init=False, default_factory=OrderedDict)
    _cached_bytes: int = field(init=False, default=0)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            name = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvshare-", dir=self.folder))
            self._database = stack.enter_context(closing(sqlite3.connect(Path(name) / "stream")))
            self._database.executescript(_TABLES)
            self._read()
            self._database.row_factory = sqlite3.Row
            places = self._interleaved(self._database.execute(_IN_ORDER, {"interleave": self.interleave}))
            self._num_requests = self._database.executemany(
                "INSERT INTO stream (row, number, turn) VALUES (?, ?, ?)",
                (place[:3] for place in islice(places, self.limit)),
            ).rowcount
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __len__(self) -> int:
        return self._num_requests

    def __iter__(self) -> Iterator[LoggedRequest]:
        for row_id, number, turn in self._database.execute(_IN_PLACE):
            row = self._row(row_id)
            yield replace(row.request, turn=turn) if row.turn_by_order else row.at(number)

    def _row(self, row_id: int) -> LoggedRow:
        """The last few rows are cached: the turns of a conversation are one row."""
        if (cached := self._cache.get(row_id)) is not None:
            self._cache.move_to_end(row_id)
            return cached[1]
        (line,) = self._database.execute("SELECT json FROM rows WHERE id = ?", (row_id,)).fetchone()
        row = _ROW.validate_json(line)
        self._cache[row_id] = (len(line), row)
        self._cached_bytes += len(line)
        while self._cached_bytes > _MAX_CACHED_BYTES and len(self._cache) > 1:
            _, (num_bytes, _) = self._cache.popitem(last=False)
            self._cached_bytes -= num_bytes
        return row

    def _read(self) -> None:
        insert, sequence = self._database.execute, 0
        for path, source in zip(self.paths, _sources(self.paths), strict=True):
            time_s: float | None = None
            for row in read_file(path, self.report, format_name=self.format_name, source=source):
                row_id = insert("INSERT INTO rows (json) VALUES (?)", (_ROW.dump_json(row),)).lastrowid
                conversation = blake2b(row.request.conversation.encode(), digest_size=16).digest()
                for number in range(row.num_requests):
                    turn, own_time_s = row.turn_and_time(number)
                    time_s = time_s if own_time_s is None else own_time_s
                    turn = None if row.turn_by_order else turn or 0
                    record = (sequence, conversation, turn, time_s, row_id, number)
                    insert("INSERT INTO requests VALUES (?, ?, ?, ?, ?, ?)", record)
                    sequence += 1
                    if sequence % _REPORT_EVERY == 0:
                        self.reading(sequence)

    def _interleaved(self, places: Iterable[sqlite3.Row]) -> Iterator[sqlite3.Row]:
        for is_untimed, stretch in groupby(places, key=lambda place: place["untimed"] is not None):
            if is_untimed and self.interleave > 1:
                conversations = groupby(stretch, key=itemgetter("untimed"))
                waiting = (iter(list(turns)) for _, turns in conversations)
                draw = None if self.seed is None else random.Random(self.seed)
                yield from take_turns(waiting, self.interleave, draw)
            else:
                yield from stretch


def take_turns(waiting: Iterator[Iterator[_T]], num_open: int, draw: random.Random | None) -> Iterator[_T]:
    """Items of `num_open` iterators at a time, one of each in rotation or drawn; an ended one is replaced."""
    open_ones: list[Iterator[_T]] = []
    place = 0
    while True:
        open_ones += islice(waiting, num_open - len(open_ones))
        if not open_ones:
            return
        place = place % len(open_ones) if draw is None else draw.randrange(len(open_ones))
        if (item := next(open_ones[place], None)) is None:
            del open_ones[place]
        else:
            yield item
            place += 1


def _sources(paths: Sequence[Path]) -> list[str]:
    """File names without folders, equal ones numbered."""
    seen: dict[str, int] = {}
    names = []
    for path in paths:
        seen[path.name] = number = seen.get(path.name, 0) + 1
        names.append(path.name if number == 1 else f"{path.name} ({number})")
    return names
