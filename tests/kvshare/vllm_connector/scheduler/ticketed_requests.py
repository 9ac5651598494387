"""Requests with a ticket, without vLLM: what happens to them is called by hand."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

from delta_tree import SegmentId
from kvshare.reasons import Reason
from kvshare.vllm_connector.scheduler.request_state import TicketedRequest
from kvshare.vllm_protocol.messages import StoredSegment, Ticket, WireCopy

if TYPE_CHECKING:
    from kvshare.vllm_connector.metadata import LoadResult

_State = TypeVar("_State", bound=StrEnum)
_Event = TypeVar("_Event", bound=StrEnum)

COPIES = (WireCopy(SegmentId(1), 0, 100, 0, 0), WireCopy(SegmentId(2), 0, 180, 120, 50))
OUTPUT, STORED = (7, 8), (StoredSegment(SegmentId(3), 100, 20, 640),)


def result(failed: bool = False, unreadable: tuple[int, ...] = ()) -> LoadResult:
    from kvshare.vllm_connector.metadata import LoadResult

    return LoadResult(failed, frozenset(map(SegmentId, unreadable)))


def new_request(*, exact_length: int = 0, unshared: Reason | None = None) -> TicketedRequest:
    ticket = Ticket("t", "ns", "digest", 400, exact_length=exact_length, copies=COPIES)
    return TicketedRequest(ticket, unshared, is_first=True)


def admit(
    request: TicketedRequest,
    *,
    num_local: int,
    held: tuple[int, ...] = (0, 1),
    loads: bool = True,
    joins: bool = False,
) -> None:
    request.look_up(num_local)
    request.joins = joins
    request.admit(held, loads=loads)


def request_prompt(request: TicketedRequest) -> None:
    """The save of its prompt is requested: copy 0, and a segment after it."""
    request.retention.request_prompt(frozenset([0]), STORED, request.repaired)


def request_save(request: TicketedRequest) -> None:
    """The save of prompt and answer together is requested: copy 0, and a segment after it."""
    request.retention.request_whole(frozenset([0]), STORED, request.repaired, OUTPUT)


def end(request: TicketedRequest, *, retains: bool) -> None:
    """The request has ended; if it `retains`, all of it is saved now."""
    if retains:
        request_save(request)
    request.end(num_prompt=400)


def reachable(transitions: Mapping[tuple[_State, _Event], _State], start: _State) -> set[_State]:
    """The states that a table leads to."""
    found, new = {start}, {start}
    while new:
        new = {following for (state, _), following in transitions.items() if state in new} - found
        found |= new
    return found
