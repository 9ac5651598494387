"""
Keeps what was measured over restarts: a file next to the metadata store, with the observations of each
machine and model.

    damaged, or of another version    moved aside, replacing an earlier `.old`; costs are measured again
    not readable                      left unchanged; reading is tried again before the next write
    not writable                      writing is tried again at the next `save`

The first case is logged here as a warning; the list of parts (`kvshare.parts`) shows and logs the others. The
file has times and sizes of prefills, no tokens. All methods block.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvshare.safe_logging import classes_and_places
from kvshare.sharing.cost import CostModel
from kvshare.sharing.regression import Row
from kvshare.whole_file import write_whole

log = logging.getLogger(__name__)

COSTS_FILE = "costs.json"
_VERSION: Literal[1] = 1  # another one wherever the features of an observation change
_MAX_KEPT = 8  # machines and models
_MAX_BYTES = 8 * 2**20  # of the file; one machine and model take some 50 kB

_Feature = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
_Seconds = Annotated[float, Field(ge=1e-9, le=1e6, allow_inf_nan=False)]
_Row = tuple[Annotated[str, Field(max_length=32)], tuple[_Feature, ...], _Seconds]


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Fingerprint(_Document):
    """The conditions that costs depend on, in words. Costs of another fingerprint are not used."""

    machine: str
    model: str
    versions: str


class _Entry(_Document):
    fingerprint: Fingerprint
    rows: dict[str, list[_Row]]


class _File(_Document):
    version: Literal[1]
    kept: Annotated[list[_Entry], Field(max_length=_MAX_KEPT)]  # those used last at the end


class KeptCosts:
    """The file of one server, and the `CostModel` whose observations it keeps. Thread-safe."""

    def __init__(self, folder: str | None, cost: CostModel) -> None:
        """`folder`: the folder of the store; None: nothing is kept."""
        self._path = None if folder is None else Path(folder) / COSTS_FILE
        self._cost = cost
        self._fingerprint: Fingerprint | None = None
        self._others: list[_Entry] = []  # of other fingerprints
        self._written: dict[str, list[Row]] = {}
        self._is_unread = False  # the file could not be read: it is not overwritten
        self.problem: str | None = None  # why nothing is kept now; the list of parts shows and logs it
        self._lock = threading.Lock()

    def use(self, fingerprint: Fingerprint) -> bool:
        """
        Measure this machine and model from now on, beginning with the observations kept for them.

        Returns: whether there are any
        """
        with self._lock:
            if fingerprint == self._fingerprint:
                return bool(self._written)
            self._keep()  # the observations of the machine and model until now
            self._fingerprint = fingerprint
            self._cost.machine = fingerprint.machine
            kept = self._take(fingerprint)
            try:
                self._cost.restore(kept)
            except ValueError as exc:
                self._set_aside(str(exc))
                kept = {}
            self._written = kept
            return bool(kept)

    def save(self) -> None:
        """Write what was measured, if there is anything new. Never raises."""
        with self._lock:
            self._keep()

    def _keep(self) -> None:
        rows = self._cost.rows()
        if self._path is None or self._fingerprint is None:
            return
        if self._is_unread:
            self._take(self._fingerprint)  # only for the entries of others: our own rows are newer
        if self._is_unread or rows == self._written or not any(rows.values()):
            return
        entry = _Entry(fingerprint=self._fingerprint, rows=rows)
        document = _File(version=_VERSION, kept=[*self._others[1 - _MAX_KEPT :], entry])
        try:
            write_whole(self._path, document.model_dump_json().encode())
        except OSError as exc:
            self.problem = exc.strerror or type(exc).__name__
        else:
            self._written, self.problem = rows, None

    def _take(self, fingerprint: Fingerprint) -> dict[str, list[Row]]:
        """Read the file and return a fingerprint's rows. Those of others are kept for the next write."""
        was_unread, kept = self._is_unread, self._read()
        if was_unread and not self._is_unread:
            self.problem = None
        self._others = [entry for entry in kept if entry.fingerprint != fingerprint]
        return next((entry.rows for entry in kept if entry.fingerprint == fingerprint), {})

    def _read(self) -> list[_Entry]:
        self._is_unread = False
        if self._path is None:
            return []
        try:
            if not self._path.exists():
                return []
            if not self._path.is_file() or self._path.stat().st_size > _MAX_BYTES:
                self._set_aside("is not a file of this program")
                return []
            return _File.model_validate_json(self._path.read_bytes()).kept
        except ValidationError as exc:
            first = exc.errors(include_url=False, include_input=False)[0]
            place = ".".join(map(str, first["loc"])) or "the document"
            self._set_aside(f"is damaged or of another version ({place}: {first['msg']})")
        except OSError as exc:
            self._is_unread = True
            self.problem = f"the file cannot be read: {exc.strerror or type(exc).__name__}"
        return []

    def _set_aside(self, problem: str) -> None:
        assert self._path is not None, "it was read"
        aside = self._path.with_name(f"{COSTS_FILE}.old")
        try:
            self._path.replace(aside)
        except OSError as exc:
            log.warning("%s %s; it is not used: %s", self._path, problem, classes_and_places(exc))
        else:
            log.warning("%s %s: moved to %s, costs are measured again", self._path, problem, aside.name)
