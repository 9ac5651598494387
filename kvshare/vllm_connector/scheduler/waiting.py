"""
Which requests wait in vLLM's scheduler, for blocks or for a load. Saves to host memory are put off meanwhile.

    for blocks    from a request's arrival, or preemption, until vLLM allocates its blocks
    for a load    from then until the workers report its load
"""

from __future__ import annotations

from collections.abc import Collection, Iterable


class Waiting:
    """Knows requests with and without tickets, by vLLM's ids."""

    def __init__(self) -> None:
        self._for_blocks: dict[str, None] = {}
        self._for_loads: set[str] = set()

    @property
    def for_blocks(self) -> Collection[str]:
        """Return the requests without blocks; those that came first are first."""
        return self._for_blocks.keys()

    @property
    def is_any(self) -> bool:
        return bool(self._for_blocks or self._for_loads)

    @property
    def is_any_for_blocks(self) -> bool:
        return bool(self._for_blocks)

    def is_waiting_for_blocks(self, request_id: str) -> bool:
        return request_id in self._for_blocks

    def is_only_one_for_blocks(self, request_id: str) -> bool:
        return self._for_blocks.keys() == {request_id}

    def arrive(self, request_ids: Iterable[str]) -> None:
        """Note requests that are new or preempted."""
        self._for_blocks.update(dict.fromkeys(request_ids))

    def admit(self, request_id: str, *, loads: bool) -> None:
        self._for_blocks.pop(request_id, None)
        if loads:
            self._for_loads.add(request_id)

    def note_loaded(self, request_ids: Iterable[str]) -> None:
        self._for_loads.difference_update(request_ids)

    def end(self, request_id: str) -> None:
        self._for_blocks.pop(request_id, None)
        self._for_loads.discard(request_id)
