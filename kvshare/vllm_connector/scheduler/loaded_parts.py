"""The parts of a ticket that lie in the positions that are loaded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from delta_tree import Span
from kvshare.sharing.plan import RepairOrder
from kvshare.vllm_connector.metadata import LoadRequest
from kvshare.vllm_connector.scheduler.request_state import TicketedRequest
from kvshare.vllm_protocol.messages import Ticket, WireCopy


def num_placeholders(copies: Iterable[WireCopy], loaded: Span) -> int:
    """Count the loaded positions that no copy covers."""
    parts = (copy.target.end - max(copy.target_start, loaded.start) for copy in copies)
    return len(loaded) - sum(max(0, length) for length in parts)


def order_within(ticket: Ticket, loaded: Span) -> RepairOrder | None:
    """Return the part of a ticket's repair order in the loaded positions; None if there is none."""
    if ticket.order is None:
        return None
    parts = (stretch.span.intersection(loaded) for stretch in ticket.order.stretches)
    stretches = tuple(part for part in parts if part)
    probes = tuple(place for place in ticket.order.probes if loaded.start <= place < loaded.end)
    return RepairOrder(stretches, probes, ticket.order.num_tokens) if stretches else None


def load_request(
    ticketed: TicketedRequest, request_id: str, block_ids: Sequence[int], copies: Sequence[WireCopy], end: int
) -> LoadRequest:
    """Make the load that fills a request's slots up to `end`, after those that vLLM has."""
    ticket, start = ticketed.ticket, ticketed.num_local
    order = order_within(ticket, Span(start, end))
    return LoadRequest(
        request_id=request_id,
        block_ids=tuple(block_ids),
        start=start,
        end=end,
        # A drafting head also reads the token after the last one.
        token_ids=ticketed.token_ids[: end + 1 if order is None else ticket.num_tokens],
        copies=tuple(copy for copy in copies if copy.target.end > start),
        order=order,
        first_approximate=ticket.first_approximate,
        media=ticketed.media,
    )
