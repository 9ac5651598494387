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
CHOSEN = ControlSettings(unshared_share=0.02, first_requests=0, confidence=0.99, block_s=2.0)


@dataclass
class Machine:
    """What sharing costs and saves there."""

    families: int = 50  # of similar prompts; 0: all prompts are unrelated
    load_factor: float = 0.3  # of the prefill, for a prompt that copies
    save_harm: float = 0.0  # by how much all others are slower if all that runs is saved
    noise: float = 0.3
    drift: float = 0.0  # by how much the whole server is slower after an hour


@dataclass
class SimulatedServer:
    """Answers requests in simulated time; `controller` decides how each is served."""

    machine: Machine
    seed: int = 1
    num_clients: int = 8
    settings: ControlSettings = CHOSEN
    now: float = 0.0
    num_stored: int = 0
    served: Counter[str | None] = field(default_factory=Counter)  # by the reason

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.controller = Controller(
            self.settings,
            full_s=lambda num_tokens: 0.5 * num_tokens / TOKENS_PER_S,  # the learned costs are far off
            break_even=lambda: 600,
            clock=lambda: self.now,
            chance=random.Random(self.seed + 1).random,
        )
        self._stored: set[int] = set()
        self._saving: list[bool] = []
        self._events: list[tuple[float, int, int, ExitStack, bool]] = []
        self._num_sent = 0
        self._prompts: dict[int, TokenIds] = {}

    def run(self, num_requests: int, *, until: int | None = None) -> int:
        """Serve so many more requests; stop when a load is on the rung `until`. Returns how many it served."""
        while len(self._events) < self.num_clients:
            self._send()
        for number in range(num_requests):
            self.now, _, _, stack, saves = heapq.heappop(self._events)
            stack.close()
            self._saving.remove(saves)
            self._send()
            if until is not None and any(load.rung == until for load in self.controller.status().loads):
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
        slow = (1 + harm) * (1 + machine.drift * self.now / 3600) * chance.lognormvariate(0, machine.noise)
        treatment.complete(output)
        self._saving.append(saves)
        ends = self.now + (prefill_s + output * TOKEN_S) * slow
        heapq.heappush(self._events, (ends, self._num_sent, family, stack, saves))

    def _saves(self, treatment: Treatment, family: int, prompt: TokenIds, *, copies: bool) -> bool:
        reused = round(0.9 * len(prompt)) if copies else 0
        if not self.controller.may_save(treatment, "one", prompt, num_reused=reused):
            return False
        self._stored.add(family)
        self.num_stored += 1
        return not copies  # only what is computed is saved

    def _prompt(self, family: int) -> TokenIds:
        """One of few lengths; prompts of one family are alike."""
        if family not in self._prompts:
            length = 400 * 2 ** (family % 4)
            tokens = np.random.default_rng(family).integers(0, 30_000, length)
            self._prompts = {**self._prompts, family: token_ids(tokens)} if self.machine.families else {}
            return token_ids(tokens)
        return self._prompts[family]
