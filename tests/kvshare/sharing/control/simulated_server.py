"""A simulated server with a fixed number of clients, in which requests slow each other down."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from delta_tree import TokenIds, token_ids
from kvshare.settings import ControlSettings
from kvshare.sharing.control import Controller, Treatment

TOKENS_PER_S, TOKEN_S = 10_000.0, 0.02
CHOSEN = ControlSettings(
    unshared_share=0.02, shadow_share=0.0, first_requests=0, confidence=0.99, block_s=2.0
)

_LOOK = 16  # requests between two looks at the rungs


@dataclass
class Machine:
    """What sharing costs and saves there."""

    families: int = 50  # of similar prompts; 0: all prompts are unrelated
    load_factor: float = 0.3  # of the prefill, for a prompt that copies
    save_harm: float = 0.0  # by how much all others are slower if all that runs is saved
    harmful_from: int = 0  # requests in flight
    noise: float = 0.3
    drift: float = 0.0  # by how much the whole server is slower after an hour


@dataclass
class SimulatedServer:
    """Answers requests in simulated time; `controller` decides how each is served."""

    machine: Machine
    seed: int = 1
    num_clients: int = 8
    settings: ControlSettings = CHOSEN
    break_even: int = 600  # tokens, as learned
    lengths: tuple[int, ...] = (400, 800, 1600, 3200)  # of prompts, in tokens
    now: float = 0.0
    num_stored: int = 0
    served: Counter[str | None] = field(default_factory=Counter)  # by the reason

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.controller = Controller(
            self.settings,
            full_s=lambda num_tokens: 0.5 * num_tokens / TOKENS_PER_S,  # the learned costs are far off
            break_even=lambda: self.break_even,
            clock=lambda: self.now,
            chance=random.Random(self.seed + 1).random,
        )
        self._stored: set[int] = set()
        self._saving: list[bool] = []
        self._prompts: dict[int, TokenIds] = {}
        self._events: list[tuple[float, int, ExitStack, bool]] = []
        self._num_sent = 0

    def run(self, num_requests: int, *, until: int | None = None) -> int:
        """Serve so many more requests, or until a load is on the rung `until`. Returns how many it served."""
        for number in range(num_requests):
            while len(self._events) < self.num_clients:
                self._send()
            self.now, _, stack, saves = heapq.heappop(self._events)
            stack.close()
            self._saving.remove(saves)
            if until is not None and not number % _LOOK and until in self.rungs.values():
                return number
        return num_requests

    @property
    def rungs(self) -> dict[str, int]:
        return {load.load: load.rung for load in self.controller.status().loads}

    def _send(self) -> None:
        machine, chance = self.machine, self.random
        self._num_sent += 1
        family = chance.randrange(machine.families) if machine.families else self._num_sent
        prompt = self._prompt(family)
        stack = ExitStack()
        treatment = stack.enter_context(self.controller.take(len(prompt), len(self._events) + 1))
        self.served[treatment.refusal] += 1
        copies = treatment.refusal is None and family in self._stored
        saves = self._saves(treatment, family, prompt, copies=copies)
        output = chance.randrange(1, 20)
        prefill_s = len(prompt) / TOKENS_PER_S * (machine.load_factor if copies else 1.0)
        harm = machine.save_harm * sum(self._saving) / max(1, len(self._saving))
        harm *= len(self._saving) >= machine.harmful_from
        slow = (1 + harm) * (1 + machine.drift * self.now / 3600) * chance.lognormvariate(0, machine.noise)
        treatment.complete(output)
        self._saving.append(saves)
        ends = self.now + (prefill_s + output * TOKEN_S) * slow
        heapq.heappush(self._events, (ends, self._num_sent, stack, saves))

    def _saves(self, treatment: Treatment, family: int, prompt: TokenIds, *, copies: bool) -> bool:
        reused = round(0.9 * len(prompt)) if copies else 0
        if not self.controller.may_save(treatment, "one", prompt, num_reused=reused):
            return False
        self._stored.add(family)
        self.num_stored += 1
        return not copies  # only what is computed is saved

    def _prompt(self, family: int) -> TokenIds:
        """Of one of few lengths; those of one family are alike, and of another one have nothing in common."""
        if family not in self._prompts:
            length = self.lengths[family % len(self.lengths)]
            tokens = token_ids(np.arange(length) + 10_000 * family)
            self._prompts = {**self._prompts, family: tokens} if self.machine.families else {family: tokens}
        return self._prompts[family]
