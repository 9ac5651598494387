"""An arm's answer to a prompt, free-running and greedy, and what computing the prompt cost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from delta_tree import TokenIds, token_ids
from kvshare.bench.fidelity.layered import LayeredModel, Pass
from kvshare.bench.fidelity.measures import free_running
from kvshare.bench.fidelity.rules import RULES
from kvshare.bench.fidelity.rules.base import num_wanted
from kvshare.bench.fidelity.rules.deviation import CHECK_LAYER, falling
from kvshare.bench.fidelity.scenario import Prompt, Scenario
from kvshare.bench.fidelity.shelf import Prefill, Shelf, covered, prefill
from kvshare.bench.fidelity.trial import Outcome, Selection, Trial
from kvshare.engines.embedded.tokenizer import PromptEncoder
from kvshare.kv.sequence import SequenceKV
from kvshare.settings import Settings
from kvshare.sharing.plan import Plan

_TOGETHER = 4  # arms that write their answers in the same passes; of more, attention costs what is won
_ANY_NUMBER = 64  # of donors, for the arms that are not the server's


@dataclass(frozen=True, slots=True)
class Arm:
    """A rule under the name that the paper has for it. `rule` None: the server's own plan."""

    name: str
    rule: str | None
    budget: float = 0.0


FULL = Arm("full", "full")
PREFIX = Arm("prefix", "prefix")
KVSHARE = Arm("kvshare", None)


@dataclass(frozen=True, slots=True)
class Answer:
    """`computed`, `b`: see `Outcome`. `is_approximate`: of the server's plan only."""

    text: str
    seconds: float  # of the pass over the prompt, laying out included
    b: float
    computed: float
    is_approximate: bool | None = None


@dataclass(frozen=True, slots=True)
class Server:
    """A model that answers, by any rule."""

    model: LayeredModel
    encoder: PromptEncoder
    settings: Settings

    def store(self, prompts: Sequence[Prompt]) -> Shelf:
        """Prompts computed in full."""
        shelf = Shelf(self._unlimited.sharing)
        for prompt in prompts:
            shelf.store_full(prefill(self.model, prompt))
        return shelf

    def trial(self, scenario: Scenario, shelf: Shelf) -> Trial | None:
        """None where nothing approximate can be copied."""
        trial = Trial(scenario, self.model, self._unlimited, shelf)
        return trial if trial.copied.any() else None

    def full_answer(self, done: Prefill, limit: int) -> str:
        """To a prompt that nothing is shared for."""
        size = len(done.prompt)
        return self._text(free_running(self.model, done.kv, done.last, num_tokens=size, limit=limit))

    def answers(self, trial: Trial, arms: Sequence[Arm], *, limit: int, turn: int) -> dict[Arm, Answer]:
        """Of every arm; another one is first in every turn, so that none is always the one that warms up."""
        start = turn % len(arms)
        order = (*arms[start:], *arms[:start])
        found: dict[Arm, Answer] = {}
        for place in range(0, len(order), _TOGETHER):
            found |= self._answers(trial, order[place : place + _TOGETHER], limit)
        return {arm: found[arm] for arm in arms}

    def _answers(self, trial: Trial, arms: Sequence[Arm], limit: int) -> dict[Arm, Answer]:
        answering = Together(self.model, len(arms), num_tokens=trial.num_tokens, limit=limit)
        costs = []
        for arm in arms:
            selection, is_approximate = self._selection(trial, arm)
            outcome, seconds = timed(trial, selection)
            if arm.rule == "cacheblend":
                seconds = timed(trial, _with_probe(trial, selection, arm.budget))[1]
            answering.add(outcome.kv, outcome.log_probabilities[0])
            costs.append((seconds, outcome.b, outcome.charged, is_approximate))
        texts = (self._text(found) for found in answering.answers())
        return {arm: Answer(text, *cost) for arm, text, cost in zip(arms, texts, costs, strict=True)}

    def _selection(self, trial: Trial, arm: Arm) -> tuple[Selection, bool | None]:
        if arm.rule is not None:
            return RULES[arm.rule].choose(trial, arm.budget), None
        plan = trial.shelf.plan(trial.scenario.prompt.token_ids, self.settings)
        if not isinstance(plan, Plan):
            return RULES["full"].choose(trial, 0.0), False
        computed = covered(plan.placeholders, trial.num_tokens)
        return Selection(computed, copies=plan.copies), plan.decision == "approx"

    def _text(self, found: TokenIds) -> str:
        return self.encoder.backend.decode(found.tolist(), skip_special_tokens=True).strip()

    @property
    def _unlimited(self) -> Settings:
        sharing = self.settings.sharing.model_copy(update={"max_donors": _ANY_NUMBER})
        return self.settings.model_copy(update={"sharing": sharing})


class Together:
    """
    Greedy answers behind one prompt's KV of several arms, a token of each in every pass.

        slots  [arm 0: prompt, answer][arm 1: prompt, answer] ...    a row sees its own arm's only

    What a token costs is reading the weights, so that a few arms at a time are faster than one.
    """

    def __init__(self, model: LayeredModel, num_arms: int, *, num_tokens: int, limit: int) -> None:
        self._model, self._num_tokens, self._limit = model, num_tokens, limit
        self._room = num_tokens + limit
        self._kv = model.model.new_sequence(num_arms * self._room)
        self._kv.k.zero_()  # what nobody sees must be a number all the same
        self._kv.v.zero_()
        self._found: list[list[int]] = []

    def add(self, kv: SequenceKV, first: torch.Tensor) -> None:
        """An arm's KV (L, >= T, H, D) and log-probabilities (V,) of its first token."""
        start = len(self._found) * self._room
        for own, given in ((self._kv.k, kv.k), (self._kv.v, kv.v)):
            own[:, start : start + self._num_tokens] = given[:, : self._num_tokens]
        self._found.append([int(first.argmax())])

    def answers(self) -> list[TokenIds]:
        """In the order in which arms were added; an end token is part of its answer."""
        eos = self._model.model.eos_token_ids(None)
        for length in range(1, self._limit):
            going = [arm for arm, found in enumerate(self._found) if found[-1] not in eos]
            if not going:
                break
            for arm, token in zip(going, self._step(going, length), strict=True):
                self._found[arm].append(token)
        return [token_ids(found) for found in self._found]

    def _step(self, going: Sequence[int], length: int) -> list[int]:
        """The next token of these arms, behind so many of each answer."""
        starts = np.array(going) * self._room
        slots = starts + self._num_tokens + length - 1
        every = np.arange(self._kv.capacity)[None, :]
        current = Pass(
            token_ids([self._found[arm][-1] for arm in going]),
            slots,
            positions=slots - starts,
            visible=(starts[:, None] <= every) & (every <= slots[:, None]),
        )
        rows = self._model.run(self._kv, current, logits_of=np.arange(len(going)))
        return [int(token) for token in rows.argmax(dim=-1)]


def timed(trial: Trial, selection: Selection) -> tuple[Outcome, float]:
    """Laying out and computing a prompt, in seconds."""
    began = time.perf_counter()
    if selection.copies is None:  # the trial keeps what is laid for all rules; a server lays it out each time
        trial.lay(trial.copies)
    outcome = trial.run(selection, forced=False)
    return outcome, time.perf_counter() - began


def _with_probe(trial: Trial, selection: Selection, budget: float) -> Selection:
    """
    What CacheBlend computes, for the clock: all tokens in the first layers, then fewer from layer to layer.

    Which tokens go on is not what the rule would find out on the way; how many is.
    """
    chosen = selection.rows.nonzero()[0]
    counts = falling(num_wanted(trial, budget), trial.num_layers, most=int(trial.copied.sum()))
    rows = np.zeros((trial.num_layers, trial.num_tokens), np.bool_)
    rows[: CHECK_LAYER + 1] = trial.copied
    for layer in range(CHECK_LAYER + 1, trial.num_layers):
        rows[layer, chosen[: counts[layer]]] = True
    return Selection(rows, copies=selection.copies)
