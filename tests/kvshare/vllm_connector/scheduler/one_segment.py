"""A scheduler side whose workers hold one segment, and vLLM's own requests with tickets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_tree import SegmentId
from kvshare.vllm_protocol.messages import TICKET_KEY, Ticket, WireCopy, digest_of
from kvshare.vllm_protocol.salts import private_salt

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvshare.vllm_connector.scheduler.scheduler import ConnectorScheduler

TOKENS = list(range(400))
SEGMENT = SegmentId(1)


def new_scheduler(*, may_move_keys: bool = True) -> ConnectorScheduler:
    """A scheduler whose workers hold one segment of 200 tokens."""
    from kvshare.vllm_connector.scheduler.event_log import EventLog
    from kvshare.vllm_connector.scheduler.scheduler import ConnectorScheduler
    from kvshare.vllm_connector.scheduler.segment_index import HeldSegment, SegmentIndex

    segments = SegmentIndex(max_bytes=1_000_000)
    segments.add(SEGMENT, HeldSegment("namespace", 200, 1_600))
    scheduler = ConnectorScheduler(
        segments=segments, events=EventLog(), shares=True, may_move_keys=may_move_keys
    )
    scheduler.saving.bytes_per_token = 8
    return scheduler


def new_request(ticket_id: str, *copies: WireCopy, request_id: str = "request") -> Request:
    """A request of vLLM with a ticket."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    ticket = Ticket(ticket_id, "namespace", digest_of(TOKENS), len(TOKENS), copies=copies)
    parameters = SamplingParams(
        max_tokens=1, extra_args={"kv_transfer_params": {TICKET_KEY: ticket.to_json()}}
    )
    return Request(request_id, TOKENS, parameters, None, cache_salt=private_salt(ticket_id))
