"""
Counts what each key and tenant has used, by day (UTC): requests, prompt tokens by where their KV came from,
tokens of answers, seconds saved. Kept over a restart in the store's folder, if it has one.

Tokens and seconds are as planned: what was not tokenized here counts as a request only.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvshare.admin import checked
from kvshare.whole_file import write_whole
from proxy.request_record import RequestRecord

log = logging.getLogger(__name__)

USAGE_FILE = "usage.json"
_MOST_DAYS = 400
_MOST_ROWS = 200_000  # of a key on a day: some 300 bytes each
_MAX_BYTES = 64 * 2**20
_TOO_MANY = 429


@dataclass(frozen=True, slots=True)
class Used:
    """Sums over requests. `refused`: those that exceeded a limit; they are among no other count."""

    requests: int = 0
    refused: int = 0
    failed: int = 0  # of the requests those with another error
    prompt_tokens: int = 0
    exact: int = 0
    copied: int = 0
    repaired: int = 0
    recomputed: int = 0
    completion_tokens: int = 0
    saved_s: float = 0.0  # expected by plans, less what lookups took

    def __add__(self, other: Used) -> Used:
        return Used(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(Used)))

    @classmethod
    def of(cls, record: RequestRecord, status: int) -> Used:
        """Return the usage of one request."""
        if status == _TOO_MANY:
            return cls(refused=1)
        total = record.answer.total
        return cls(
            requests=1,
            failed=int(status >= 400),
            prompt_tokens=total.num_prompt_tokens,
            exact=total.num_exact,
            copied=total.num_copied,
            repaired=total.num_repaired,
            recomputed=total.num_recomputed,
            completion_tokens=record.answer.num_completion_tokens or 0,
            saved_s=total.saved_s - record.lookup_s,
        )


@dataclass(frozen=True, slots=True)
class UsageQuestion:
    """`by`: what a row is of. `since`: the first day."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    by: Literal["key", "tenant", "day"] = "key"
    since: date | None = None
    tenant: str | None = None

    @classmethod
    def from_query(cls, query: Mapping[str, str]) -> UsageQuestion:
        """Raises RequestError that names what is wrong."""
        return checked(cls, dict(query))


_Row = tuple[str, str, str]  # day, tenant, key


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    day: date
    tenant: str
    key: str
    used: dict[str, float]


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    version: Literal[1]
    rows: list[_Entry] = Field(max_length=1_000_000)


class UsageLedger:
    """The sums of one server. `load`, `save` and sums run in threads, all else on the event loop."""

    def __init__(
        self, folder: str | None, *, today: Callable[[], date] = lambda: datetime.now(UTC).date()
    ) -> None:
        """`folder`: of the store; None: nothing is kept."""
        self._path = None if folder is None else Path(folder) / USAGE_FILE
        self._today = today
        self._rows: dict[_Row, Used] = {}
        self._saved: Mapping[_Row, Used] = {}
        self._lock = threading.Lock()  # of the rows
        self._is_unread = False  # it may be another user's: nothing is written over it
        self.problem: str | None = None  # why nothing is kept now; the list of parts shows and logs it

    def count(self, record: RequestRecord, status: int) -> None:
        """Add a request that is over and wanted something computed."""
        caller = record.admission.caller
        row = (self._today().isoformat(), caller.tenant, caller.name)
        with self._lock:
            self._rows[row] = self._rows.get(row, Used()) + Used.of(record, status)

    async def document(self, question: UsageQuestion) -> dict[str, Any]:
        """Rows by key, tenant or day: most prompt tokens first, or days in order. And the total."""
        return await asyncio.to_thread(self._document, question)

    def _document(self, question: UsageQuestion) -> dict[str, Any]:
        """Called in a thread. One C call copies the rows, so that none is added meanwhile."""
        return _document(self._rows.copy(), question)

    def by_tenant(self) -> dict[str, Used]:
        sums: dict[str, Used] = {}
        for (_, tenant, _), used in self._rows.items():
            sums[tenant] = sums.get(tenant, Used()) + used
        return sums

    def load(self) -> None:
        """Add what an earlier run has saved. A damaged file is moved aside, with a warning."""
        self._is_unread = False
        if self._path is None:
            return
        earlier: dict[_Row, Used] = {}
        try:
            if not self._path.is_file():
                self.problem = None
                return
            if self._path.stat().st_size > _MAX_BYTES:
                raise OSError(f"it has more than {_MAX_BYTES} bytes")
            entries = _File.model_validate_json(self._path.read_bytes()).rows
            earlier = {(each.day.isoformat(), each.tenant, each.key): _used(each.used) for each in entries}
        except ValidationError:
            if not self._move_aside(self._path):
                return
        except OSError as exc:
            self._is_unread = True
            self.problem = f"the file cannot be read: {exc.strerror or exc}"
            return
        self._saved, self.problem = earlier, None
        with self._lock:
            for row, used in earlier.items():
                self._rows[row] = used + self._rows.get(row, Used())

    def _move_aside(self, path: Path) -> bool:
        """Keep a damaged file next to the new one; false where that fails: then it is not written over."""
        aside = path.with_name(f"{USAGE_FILE}.old")
        try:
            path.replace(aside)
        except OSError as exc:
            self._is_unread = True
            self.problem = f"the file is damaged, and cannot be moved aside: {exc.strerror or exc}"
            return False
        log.warning("%s is damaged or of another version: moved to %s", path, aside.name)
        return True

    def save(self) -> None:
        """Write what is new. Never raises."""
        if self._is_unread:
            self.load()
        rows = dict(self._rows)
        if self._path is None or self._is_unread or rows == self._saved:
            return
        days = set(sorted({day for day, _, _ in rows})[-_MOST_DAYS:])
        kept = sorted(((row, used) for row, used in rows.items() if row[0] in days), key=lambda each: each[0])
        entries = [
            _Entry(day=date.fromisoformat(day), tenant=tenant, key=key, used=asdict(used))
            for (day, tenant, key), used in kept[-_MOST_ROWS:]
        ]
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(self._path, _File(version=1, rows=entries).model_dump_json().encode())
        except OSError as exc:
            self.problem = exc.strerror or type(exc).__name__
        else:
            self._saved, self.problem = rows, None


def _document(used_by: Mapping[_Row, Used], question: UsageQuestion) -> dict[str, Any]:
    first = "" if question.since is None else question.since.isoformat()
    sums: dict[tuple[tuple[str, str], ...], Used] = {}
    chosen = [(row, used) for row, used in used_by.items() if row[0] >= first]
    chosen = [(row, used) for row, used in chosen if question.tenant in (None, row[1])]
    for (day, tenant, key), used in chosen:
        names = {"key": {"tenant": tenant, "key": key}, "tenant": {"tenant": tenant}, "day": {"day": day}}
        name = tuple(names[question.by].items())
        sums[name] = sums.get(name, Used()) + used
    rows = [{**dict(name), **_rounded(used)} for name, used in sums.items()]
    rows.sort(key=lambda row: row["day"] if question.by == "day" else -row["prompt_tokens"])
    days = sorted(row[0] for row, _ in chosen)
    return {
        "by": question.by,
        "first_day": days[0] if days else None,
        "last_day": days[-1] if days else None,
        "rows": rows,
        "total": _rounded(sum((used for _, used in chosen), Used())),
    }


def _used(values: Mapping[str, float]) -> Used:
    """Counts as integers; what another version has more is left out."""
    known = {each.name for each in fields(Used)}
    counts = {name: int(value) for name, value in values.items() if name in known and name != "saved_s"}
    return replace(Used(**counts), saved_s=float(values.get("saved_s", 0.0)))


def _rounded(used: Used) -> dict[str, Any]:
    return {**asdict(used), "saved_s": round(used.saved_s, 3)}
