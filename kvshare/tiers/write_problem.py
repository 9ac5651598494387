"""Why nothing is written to a tier now: logged when it begins and when it ends."""

from __future__ import annotations

import logging


class WriteProblem:
    """`reason` is None while writing works. One thread writes; any thread may read `reason`."""

    def __init__(
        self, log: logging.Logger, where: str, *, lost_with: str, prefix: str = "", reason: str | None = None
    ) -> None:
        """For the log: `where` KV goes, and with what it is lost. `reason`: why it fails now; is logged."""
        self.reason = reason
        self._log, self._prefix = log, prefix
        self._where, self._lost_with = where, lost_with

    def note(self, exc: OSError) -> None:
        """Note that a write has failed. Only the first of several in a row is logged."""
        if self.reason is None:
            self.reason = exc.strerror or type(exc).__name__
            self._log.warning(
                "%sKV is not written to %s: %s. It stays in memory, where it is lost with %s; this is tried "
                "again",
                self._prefix,
                self._where,
                self.reason,
                self._lost_with,
            )

    def end(self) -> None:
        """Note that a write has succeeded."""
        if self.reason is not None:
            self.reason = None
            self._log.warning("%sKV is written to %s again", self._prefix, self._where)
