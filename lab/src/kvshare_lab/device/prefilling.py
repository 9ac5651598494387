"""The requests that a simulated replica prefills, as far as the proxy in front of it knows."""

from __future__ import annotations

from typing import NamedTuple, cast

from kvshare.fleet.client import ControlClient, VllmClient
from kvshare.fleet.replica import Replica
from kvshare.fleet.routed_request import RoutedRequest
from kvshare.sharing.rates import Rates
from kvshare_lab.device.engine import Answer


class SentRequest(NamedTuple):
    """A request on its way through the proxy."""

    request: RoutedRequest
    answer: Answer


class Prefilling:
    """`replica`: the product's state of it. Nothing is asked of its clients."""

    def __init__(self, name: str) -> None:
        self.replica = Replica(name, cast(VllmClient, None), cast(ControlClient, None))
        self._sent: list[SentRequest] = []

    def add(self, sent: SentRequest, at: float, rates: Rates) -> None:
        """It is sent at this time."""
        self.note(at)
        sent.request.progress.queue_s = self.replica.queue(rates).computing_s
        sent.request.progress.sent_at = at
        others = self.replica.being_prefilled()
        for other in others:
            other.progress.was_alone = False
        sent.request.progress.was_alone = not others
        self.replica.requests.add(sent.request)
        self._sent.append(sent)

    def note(self, time: float) -> None:
        """What the proxy knows at this time: whose first token it has passed on."""
        for sent in tuple(self._sent):
            if sent.answer.token_at and sent.answer.token_at[0] <= time:
                sent.request.note_prefilled()
                self.replica.requests.discard(sent.request)
                self._sent.remove(sent)
