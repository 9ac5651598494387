"""
What has been measured so far, and how much time is left.

Whenever a part ends, its figures are noted on stderr and the whole document is written again, so that a run
that is cut off loses nothing that was measured.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvshare.cli.output import note
from kvshare.errors import KVShareError

log = logging.getLogger(__name__)

Figures = dict[str, Any]
_STOPPING_S, _STOPPING_SHARE = 30.0, 0.1  # what is left of the time to stop the servers, the less of both
_TO_COME = "the run ended before this part"


class NotMeasurableError(KVShareError):
    """This machine cannot show it, which is no failure."""


class Deadline:
    """The end of the time in which parts are measured; servers are stopped afterwards."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._at = time.monotonic() + seconds - min(_STOPPING_S, _STOPPING_SHARE * seconds)

    @property
    def left_s(self) -> float:
        return max(0.0, self._at - time.monotonic())


@dataclass(slots=True)
class Report:
    """
    The figures of one backend of attention, part by part.

    `parts`: in their order. `on_change`: called whenever something was added.
    """

    backend: str
    parts: Sequence[str]
    deadline: Deadline
    on_change: Callable[[], None] = lambda: None
    found: dict[str, Figures | None] = field(default_factory=dict)
    not_measured: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    has_failed: bool = False
    device_bytes: int | None = None  # in use once everything has run

    async def add(
        self,
        name: str,
        measure: Callable[[Progress], Awaitable[Figures]],
        *,
        least_s: float,
        share: float = 1.0,
    ) -> None:
        """
        Run a part in the time that is left, or note why not. Its error does not end the other parts.

        `share`: of the time left, in which it begins rows; what it has begun may take longer.
        """
        left_s = self.deadline.left_s
        if share * left_s < least_s:
            self.skip(
                name, f"{left_s:.0f} s of {self.deadline.seconds:.0f} s were left, expected {least_s:.0f} s"
            )
            return
        began = time.monotonic()
        progress = Progress(self, name, began + share * left_s)
        try:
            async with asyncio.timeout(left_s) as limit:
                self.found[name] = await measure(progress)
        except NotMeasurableError as exc:
            self.not_measured[name] = str(exc)
        except TimeoutError as exc:
            if limit.expired():
                self._cut_off(name, began)
            else:
                self.fail([name], repr(exc))
        except Exception as exc:  # minutes on a GPU are rare: the next part may be measured
            log.exception("%s failed", name)
            self.fail([name], str(exc) if isinstance(exc, KVShareError) else repr(exc))
        except BaseException:  # the run is being ended
            self._cut_off(name, began)
            raise
        finally:
            self.seconds[name] = time.monotonic() - began
            self.announce(name)

    def skip(self, name: str, reason: str) -> None:
        """Note what is not measured, which is no failure."""
        self.not_measured[name] = reason
        self.announce(name)

    def fail(self, names: Sequence[str], problem: str) -> None:
        """Note why these parts were not measured. An earlier reason stays."""
        self.has_failed = True
        self.not_measured = dict.fromkeys(names, problem) | self.not_measured
        self.on_change()

    def announce(self, name: str) -> None:
        """One line on stderr, and the document."""
        left = f"{self.deadline.left_s:.0f} s left"
        if (found := self.found.get(name)) is not None:
            note(f"{self.backend}, {name} ({self.seconds.get(name, 0):.0f} s, {left}): {json.dumps(found)}")
        for missing, reason in self.not_measured.items():
            if missing.split(".")[0] == name:
                note(f"{self.backend}, no {missing} ({left}): {reason}")
        self.on_change()

    def _cut_off(self, name: str, began: float) -> None:
        after = f"cut off after {time.monotonic() - began:.0f} s"
        self.not_measured[name] = after if self.found.get(name) is None else f"{after}: not all of it"

    def to_json(self) -> dict[str, Any]:
        verdicts = [found.get("passed") for found in self.found.values() if found is not None]
        missing = {name: _TO_COME for name in self.parts if self.found.get(name) is None}
        return {
            "backend": self.backend,
            "passed": not self.has_failed and False not in verdicts,
            **{name: self.found.get(name) for name in self.parts},
            "seconds": self.seconds,
            "device_bytes": self.device_bytes,
            "not_measured": missing | self.not_measured,
        }


@dataclass(frozen=True, slots=True)
class Progress:
    """A part at work: what it has measured so far is in the report, whatever happens to the rest."""

    report: Report
    name: str
    until_s: float  # by `time.monotonic`: no row begins that would end later

    def keep(self, found: Figures) -> None:
        """The figures so far, which replace those before."""
        self.report.found[self.name] = found
        self.report.on_change()

    def lacks(self, what: str, reason: str) -> None:
        """Name a figure of this part that is not measured."""
        self.report.not_measured[f"{self.name}.{what}"] = reason

    def has_time(self, what: str, expected_s: float) -> bool:
        """Whether so many seconds are left; if not, the figure is named as not measured."""
        left_s = self.left_s
        if left_s < expected_s:
            self.lacks(what, f"{left_s:.0f} s were left, expected {expected_s:.0f} s")
        return left_s >= expected_s

    @property
    def left_s(self) -> float:
        """For this part."""
        return max(0.0, min(self.report.deadline.left_s, self.until_s - time.monotonic()))

    def earlier(self, name: str) -> Figures:
        """What another part has measured."""
        return self.report.found.get(name) or {}
