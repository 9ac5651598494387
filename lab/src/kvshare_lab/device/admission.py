"""The product's controller in front of a simulated server, by the simulation's clock."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager

from delta_tree import TokenIds
from kvshare.settings import ControlSettings
from kvshare.sharing.control import Controller, Treatment
from kvshare.sharing.pipeline import Sharing
from kvshare.status import ControlStatus
from kvshare_lab.device.engine import Answer


class Controlled:
    """Decides how each request is served, and learns when its answer ends, as the proxy's router does."""

    def __init__(
        self, settings: ControlSettings, sharing: Sharing, *, clock: Callable[[], float], seed: int = 0
    ) -> None:
        """`seed`: which blocks of time are served without sharing."""
        self._control = Controller(
            settings,
            full_s=lambda num_tokens: sharing.cost.rates.full_s(num_tokens),
            break_even=lambda: sharing.shortest_that_pays,
            clock=clock,
            chance=random.Random(seed).random,
        )
        self._taken: dict[str, tuple[AbstractContextManager[Treatment], Treatment]] = {}

    def begin(self, request_id: str, num_tokens: int) -> Treatment:
        """A request arrives; it is in flight until `end`."""
        taken = self._control.take(num_tokens, 1 + len(self._taken))
        treatment = taken.__enter__()
        self._taken[request_id] = taken, treatment
        return treatment

    def may_store(self, request_id: str, namespace: str, prompt: TokenIds, *, num_reused: int) -> bool:
        """Whether its KV is saved."""
        _, treatment = self._taken[request_id]
        return self._control.may_save(treatment, namespace, prompt, num_reused=num_reused)

    def end(self, answer: Answer) -> None:
        """The answer is complete. One of a request that did not begin here says nothing."""
        if (found := self._taken.pop(answer.request_id, None)) is not None:
            taken, treatment = found
            treatment.complete(len(answer.token_at))
            taken.__exit__(None, None, None)

    def status(self) -> ControlStatus:
        return self._control.status()
