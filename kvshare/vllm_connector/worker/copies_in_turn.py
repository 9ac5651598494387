"""
Copies that are made one after the other as one job: first from blocks, then from segments; for each part of a
cache whose layers differ in shape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from delta_tree import SegmentId, Span
from kvshare.vllm_connector.worker.copying import LoadWork, Work
from kvshare.vllm_connector.worker.device import Device
from kvshare.vllm_connector.worker.disk_first import DiskFirst
from kvshare.vllm_connector.worker.disk_reads import Read, Reads
from kvshare.vllm_connector.worker.load_copies import block_copies, row_copies
from kvshare.vllm_connector.worker.paged_cache import PagedCache
from kvshare.vllm_connector.worker.segment_store import Stored
from kvshare.vllm_connector.worker.under_way import PendingLoad, PendingSave
from kvshare.vllm_protocol.places import READ_PARTS


class CopiesInTurn:
    """Several pieces of work as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works
        self._current = works[0]  # the work whose batches are being made

    @property
    def has_room(self) -> bool:
        return self._current.has_room

    @property
    def is_past(self) -> bool:
        return all(work.is_past for work in self._works)

    def batches(self) -> Iterator[None]:
        for number, work in enumerate(self._works):
            self._current = work  # before the yield, after which `has_room` is asked
            if number:
                yield
            yield from work.batches()

    def wait_until_read(self) -> None:
        for work in self._works:
            work.wait_until_read()

    def finish(self) -> Mapping[str, float]:
        seconds = Counter[str]()
        for work in self._works:
            seconds.update(work.finish())
        return seconds


class LoadsInTurn(CopiesInTurn):
    """Several loads as one, perhaps after copies from blocks."""

    arrivals = None  # no pass begins before all of it has arrived

    def __init__(self, loads: Sequence[LoadWork], *, blocks: Sequence[Work] = ()) -> None:
        super().__init__([*blocks, *loads])
        self._loads = loads

    @property
    def damaged(self) -> set[SegmentId]:
        return set().union(*(load.damaged for load in self._loads))

    def rush(self) -> None:
        """Do nothing: no pass waits for its layers."""

    def written_s(self, since: Any) -> float:
        """Return 0: no pass begins before the load is done."""
        return 0.0


def load_work(
    device: Device, cache: PagedCache, load: PendingLoad, reads: Reads | None, *, mark: Any, is_asleep: bool
) -> LoadWork:
    """
    Make the load of all parts of the cache; while vLLM sleeps, one without copies.

    Blocks are written after the mark. If steps in flight still compute what blocks hold, these are read after
    those steps. `reads`: from disk, before the copies.
    """
    request, blocks = load.request, list[Work]()

    def copies(number: int, held: Mapping[SegmentId, Stored]) -> LoadWork:
        find = partial(row_copies, cache, request, held, reads, number)
        return device.load(cache.parts[number], list if is_asleep else find, mark=mark)

    stored = [copies(number, load.held) for number in range(len(cache.parts))]
    if reads is not None:
        stored[0], load.late = DiskFirst(reads, _in_parts(load, reads, partial(copies, 0))), reads.late
    if request.sources and not is_asleep:
        find_copies = partial(block_copies, cache, request)
        readable = device.mark() if request.follows_steps else mark
        blocks = [device.copy_blocks(part, find_copies, mark=readable) for part in cache.parts]
    return LoadsInTurn(stored, blocks=blocks) if blocks or len(stored) > 1 else stored[0]


def _in_parts(
    load: PendingLoad, reads: Reads, copies: Callable[[Mapping[SegmentId, Stored]], LoadWork]
) -> list[tuple[Sequence[Read], LoadWork]]:
    """Return a load in the parts in which it is read: first what is in memory, if anything is."""
    read, wanted = reads.parts(READ_PARTS), reads.wanted
    held = {key: stored for key, stored in load.held.items() if key not in wanted}
    parts: list[tuple[Sequence[Read], LoadWork]] = [((), copies(held))] if held or not read else []
    for part in read:
        ids = [each.segment_id for each in part]
        parts.append((part, copies({key: load.held[key] for key in ids if key in load.held})))
    return parts


def save_work(
    device: Device, cache: PagedCache, save: PendingSave, spans: Sequence[tuple[Stored, Span]]
) -> Work:
    """Make the save of all parts of the cache: spans of a request, from its blocks into segments."""
    works = [
        device.save(
            part,
            save.request.block_ids,
            [(stored.parts[number], span) for stored, span in spans],
            mark=save.mark,
        )
        for number, part in enumerate(cache.parts)
    ]
    return CopiesInTurn(works) if len(works) > 1 else works[0]
