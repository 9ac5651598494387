"""Reads the tickets in requests, and says which plans must not be carried out."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from delta_tree import TokenIds
from kvshare.reasons import Reason
from kvshare.vllm_protocol.json_fields import WireError
from kvshare.vllm_protocol.media import Medium, identified
from kvshare.vllm_protocol.messages import TICKET_KEY, Ticket, digest_of
from kvshare.vllm_protocol.salts import private_salt

if TYPE_CHECKING:
    from vllm.v1.request import Request

log = logging.getLogger("vllm.kvshare")

_MAX_SEEN = 4096  # tickets


class ReadTicket(NamedTuple):
    ticket: Ticket
    is_first: bool  # the first choice of a request with n > 1, which sends its ticket n times


class TicketReader:
    """One per scheduler."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, None] = OrderedDict()

    def read(self, request: Request) -> ReadTicket | None:
        """Return the request's ticket; None if it has none, or one that cannot be read."""
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


def why_unshared(
    request: Request,
    ticket: Ticket,
    token_ids: TokenIds,
    *,
    may_move_keys: bool,
    media: Sequence[Medium] | None = (),
) -> Reason | None:
    """
    Return why a ticket's plan must not be carried out, or None. `token_ids`: the request's prompt. `media`:
    the media of the prompt; None if they must not be shared.
    """
    if request.lora_request is not None:
        return Reason.LORA
    if media is None or (media and ticket.order is not None):  # repairs could be chosen in media
        return Reason.MULTIMODAL
    if request.pooling_params is not None:
        return Reason.POOLING
    if request.prompt_token_ids is None or request.prompt_embeds is not None or request.resumable:
        return Reason.NOT_TOKENS
    digest = digest_of(identified(token_ids, media))
    if (ticket.num_tokens, ticket.prompt_digest) != (request.num_prompt_tokens, digest):
        return Reason.PROMPT_MISMATCH
    if not ticket.is_exact and request.cache_salt != private_salt(ticket.ticket_id):
        return Reason.NOT_PRIVATE  # vLLM's prefix cache would give its approximate blocks to other requests
    if not may_move_keys and any(copy.shift for copy in ticket.copies):
        return Reason.ROTATION_UNKNOWN
    return None
