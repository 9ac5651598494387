"""Reads the tickets that requests bring along."""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import NamedTuple

from vllm.v1.request import Request

from kvshare.vllm_protocol.json_fields import WireError
from kvshare.vllm_protocol.messages import TICKET_KEY, Ticket

log = logging.getLogger("vllm.kvshare")

_MAX_SEEN = 4096  # tickets


class ReadTicket(NamedTuple):
    ticket: Ticket
    is_first: bool  # of the choices of a request with n > 1, which sends its ticket n times


class TicketReader:
    """One per scheduler."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, None] = OrderedDict()

    def read(self, request: Request) -> ReadTicket | None:
        """The request's ticket; None if it has none, or one that cannot be read."""
        document = (request.kv_transfer_params or {}).get(TICKET_KEY)
        if document is None:
            return None
        try:
            ticket = Ticket.from_json(document)
        except WireError as exc:
            log.warning("request %s: its ticket cannot be read: %s", request.request_id, exc)
            return None
        is_first = ticket.ticket_id not in self._seen
        self._seen[ticket.ticket_id] = None
        if len(self._seen) > _MAX_SEEN:
            self._seen.popitem(last=False)
        return ReadTicket(ticket, is_first)
