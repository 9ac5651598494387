"""
Requests that the proxy itself sends to a replica. They take the way of planned requests, with tickets, and
leave nothing behind: no prompt is stored or indexed, no request is counted.

Whatever the replica retains of them is in a namespace and under a salt of their own, which no key has, until
it is dropped.
"""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from delta_tree import TokenIds
from kvshare.errors import UpstreamError
from kvshare.fleet.routed_request import Incoming, RequestProgress, Routed, RoutedRequest
from kvshare.fleet.tickets import ticket_for
from kvshare.namespace import Owner
from kvshare.requests import Prompt, SharingMode
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.vllm_protocol.messages import FinishedReport, Prefilled
from vector_index import PromptText

if TYPE_CHECKING:
    from kvshare.fleet.replica import Replica

_SCOPE = "measurement"  # no key has it
_ANSWER_S = 120.0
_REPORT_S = 30.0  # of the connector, after the answer


@dataclass(frozen=True, slots=True, eq=False)
class OwnAnswer:
    """A request of our own, its times, and the connector's report."""

    routed: Routed
    progress: RequestProgress
    finished: FinishedReport


class OwnRequests:
    """Sends them, and takes what the journals report of them."""

    def __init__(self) -> None:
        self._owner = Owner(secrets.token_hex(16), _SCOPE)
        self._awaited: dict[str, asyncio.Future[FinishedReport]] = {}  # by ticket

    def take(self, event: Prefilled | FinishedReport) -> bool:
        """Return whether an event is of such a request; if so, no other part needs it."""
        report = self._awaited.get(event.ticket_id)
        if report is None:
            return False
        if isinstance(event, FinishedReport) and not report.done():
            report.set_result(event)
        return True

    async def send(
        self, replica: Replica, tokens: TokenIds, plan: Plan | NoPlan, *, store: bool
    ) -> OwnAnswer:
        """
        Send a prompt that is answered with one token, and wait for the connector's report.

        Raises:  UpstreamError, TimeoutError
        """
        if replica.models is None or replica.info is None:
            raise UpstreamError(f"replica {replica.name} does not serve any more")
        namespace = replica.namespace(self._owner).digest
        ticket = ticket_for(plan, tokens, ticket_id=uuid.uuid4().hex, namespace=namespace, store=store)
        ticket = replace(ticket, from_memory=True)
        incoming = Incoming(
            self._owner, Prompt(tokens, PromptText("", "")), SharingMode.APPROX, may_store=store
        )
        request = RoutedRequest(incoming, Routed(plan, ticket))
        body = {
            "model": replica.models.names[0],
            "prompt": tokens.tolist(),
            "max_tokens": 1,
            "temperature": 0,
            "stream": True,
            "cache_salt": request.salt,
            "kv_transfer_params": request.transfer_params,
        }
        with self._expecting(ticket.ticket_id) as report:
            with replica.computing(request):
                async with asyncio.timeout(_ANSWER_S):
                    prefill_s = await replica.vllm.complete(body, headers=replica.headers)
            async with asyncio.timeout(_REPORT_S):
                finished = await report
        return OwnAnswer(request.routed, replace(request.progress, prefill_s=prefill_s), finished)

    @contextmanager
    def _expecting(self, ticket_id: str) -> Iterator[asyncio.Future[FinishedReport]]:
        """A report that comes afterwards is of an unknown request: what it names is dropped."""
        report = self._awaited[ticket_id] = asyncio.get_running_loop().create_future()
        try:
            yield report
        finally:
            del self._awaited[ticket_id]
