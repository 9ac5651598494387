"""
A scenario with its plan, ready for any repair rule: copies, the full prefill, and a pass with repairs.

    b          layer-tokens of repaired positions / (layers x prompt tokens)
    charged    layer-tokens that get fresh Q, K, V, selection passes included / (layers x prompt tokens)

Every rule gets the same donors, plan and rotation, unless it is about other copies. Positions without a copy
and the last `tail` positions of the prompt are computed in every arm; they are called the base.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from delta_tree import Copy, Span, TokenIds, token_ids
from kvshare.kv.attention import PartialPass
from kvshare.kv.sequence import SequenceKV
from kvshare.settings import Settings
from kvshare.sharing.plan import within
from kvshare.sharing.repair_choice import covered, num_runs
from kvshare_lab.fidelity.layered import ForwardPass, LayeredModel, LayerHook, Mask, causal, greedy_answers
from kvshare_lab.fidelity.scenario import Scenario
from kvshare_lab.fidelity.stored_prompts import Floats, Prefill, StoredPrompts, prefill

NUM_FORCED = 16  # tokens of the full prefill's own answer; every arm is measured along them


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """
    What a rule chose to compute again.

    `rows`: (T,) for all layers, or (L, T). `probe`: layer-tokens of the passes that selected them. `copies`:
    instead of the plan's. `kv`: what the slots hold at the start, if it is not just the copies. `computed`:
    (T,) rows of the base that `kv` already holds, computed by an earlier pass.
    """

    rows: Mask
    probe: float = 0.0
    hook: LayerHook | None = None
    copies: tuple[Copy, ...] | None = None
    kv: SequenceKV | None = None
    computed: Mask | None = None


@dataclass(slots=True, eq=False)
class Outcome:
    """The result of an arm: log-probabilities after the prompt and along the forced answer, and the cost."""

    kv: SequenceKV
    log_probabilities: torch.Tensor  # (F, V)
    b: float
    charged: float
    runs: int  # how many runs the repairs add to the plan's own
    computed: Mask  # (T,) positions whose KV is fresh in all layers
    candidate_scores: NDArray[np.float64]  # nats per token; empty if candidates are not ranked


class Trial:
    """A scenario whose stored prompts are computed and whose plan is made."""

    def __init__(
        self, scenario: Scenario, model: LayeredModel, settings: Settings, stored: StoredPrompts
    ) -> None:
        self.scenario, self.model, self.settings, self.stored = scenario, model, settings, stored
        self.num_tokens, self.num_layers = len(scenario.prompt), model.num_layers
        composition = stored.compose(scenario.prompt.token_ids)
        self.exact_length = min(composition.exact_length, self.num_tokens - 1)
        self.copies = within(composition.copies, Span(0, self.num_tokens - 1))  # the last token is computed
        is_copied = covered([copy.target for copy in self.copies], self.num_tokens)
        tail = np.arange(self.num_tokens) >= self.num_tokens - settings.repair.tail
        exact = np.arange(self.num_tokens) < self.exact_length
        self.placeholders: Mask = ~is_copied
        self.base: Mask = ~is_copied | (tail & ~exact)
        self.copied: Mask = is_copied & ~tail & ~exact  # the positions among which a rule chooses
        self._answer, self._answer_limit = token_ids([]), 0

    @cached_property
    def approximate_copies(self) -> tuple[Copy, ...]:
        """The copies behind the exact prefix."""
        return within(self.copies, Span(self.exact_length, self.num_tokens))

    @cached_property
    def full(self) -> Prefill:
        """The full prefill of the prompt, with room for the forced answer."""
        return prefill(self.model, self.scenario.prompt, room=NUM_FORCED)

    @cached_property
    def answer(self) -> TokenIds:
        return self.free_answer(NUM_FORCED)

    def free_answer(self, limit: int) -> TokenIds:
        """The greedy answer of the full prefill, at most `limit` tokens."""
        if limit > self._answer_limit:
            self._answer_limit = limit
            start = (self.full.kv, self.full.first)
            (self._answer,) = greedy_answers(self.model, [start], num_tokens=self.num_tokens, limit=limit)
        return self._answer[:limit]

    @cached_property
    def truth(self) -> torch.Tensor:
        """(F, V) log-probabilities along the answer: the engine's own pass over prompt and answer."""
        return forced_pass(self.model, self.scenario.prompt.token_ids, self.answer)

    @cached_property
    def placed(self) -> SequenceKV:
        """The plan's copies in their slots."""
        return self.place(self.copies)

    def place(self, copies: Sequence[Copy]) -> SequenceKV:
        """A sequence with these copies in their slots, zeros elsewhere, and room for the answers."""
        room = NUM_FORCED + sum(len(candidate) for candidate in self.scenario.candidates)
        kv = self.model.model.new_sequence(self.num_tokens + room)
        kv.k.zero_()
        kv.v.zero_()
        kv.write_copies(copies, self.stored.kv)
        return kv

    @cached_property
    def base_pass(self) -> tuple[Floats, SequenceKV]:
        """
        A pass over the base alone, before anything is repaired: see `watch`.

        A server would need it as its first pass, and would compute the base again with the repairs.
        """
        return self.watch(self.base)

    def watch(self, rows: Mask) -> tuple[Floats, SequenceKV]:
        """
        Compute these rows over the copies.

        Returns: (L, N, T) their attention to every slot, mean over heads; and the KV after the pass
        """
        slots = rows.nonzero()[0]
        attention = np.zeros((self.num_layers, len(slots), self.num_tokens), np.float32)

        def record(layer: int, weights: torch.Tensor) -> None:
            attention[layer] = weights.mean(0).cpu()

        kv = self.placed.fork(self.num_tokens)
        forward = ForwardPass(self.scenario.prompt.token_ids[slots], slots, weights=record)
        self.model.run(kv, forward, logits_of=np.array([len(slots) - 1]))
        return attention, kv

    @cached_property
    def first_approximate(self) -> int:
        """Position of the first copy that a rule may repair; `num_tokens` if there is none."""
        return int(self.copied.argmax()) if self.copied.any() else self.num_tokens

    @cached_property
    def key_deviation(self) -> torch.Tensor:
        """(L, T, H, D) the full prefill's keys minus the copied ones; 0 where nothing is copied."""
        return self._deviation(self.full.kv.k, self.placed.k)

    @cached_property
    def value_deviation(self) -> torch.Tensor:
        """The same of values."""
        return self._deviation(self.full.kv.v, self.placed.v)

    def _deviation(self, true: torch.Tensor, placed: torch.Tensor) -> torch.Tensor:
        difference = (true[:, : self.num_tokens] - placed[:, : self.num_tokens]).cpu()
        difference[:, torch.from_numpy(self.placeholders)] = 0.0
        return difference

    def run(self, selection: Selection, *, rank: bool = False, forced: bool = True) -> Outcome:
        """Compute one arm. `rank`: score the candidates too. Without `forced`, compute the prompt only."""
        rows = np.atleast_2d(selection.rows)
        earlier = np.zeros(self.num_tokens, np.bool_) if selection.computed is None else selection.computed
        repaired = rows.any(axis=0) & ~self.base
        slots = (self.base & ~earlier | repaired).nonzero()[0]
        answers = _Answers(self, rank=rank, forced=forced)
        num_answers = len(answers.slots)
        at_layer = None
        if selection.rows.ndim == 2:
            everywhere = np.ones((self.num_layers, num_answers), np.bool_)
            at_layer = np.hstack([rows[:, slots] | ~repaired[slots], everywhere])
        forward = ForwardPass(
            token_ids(np.concatenate([self.scenario.prompt.token_ids[slots], answers.tokens])),
            np.concatenate([slots, answers.slots]),
            positions=np.concatenate([slots, answers.positions]),
            visible=answers.visible(slots),
            repaired=np.concatenate([repaired[slots], np.zeros(num_answers, np.bool_)]),
            at_layer=at_layer,
            hook=selection.hook,
        )
        if selection.copies is not None:
            kv = self.place(selection.copies)
        else:
            kv = (selection.kv or self.placed).fork(self.num_tokens)
        after = np.arange(len(slots) - 1, len(slots) + num_answers)
        log_probabilities = self.model.run(kv, forward, logits_of=after)
        spent, size = sum(forward.num_computed), self.num_layers * self.num_tokens
        return Outcome(
            kv=kv,
            log_probabilities=log_probabilities[: len(answers.forced) + 1],
            b=spent / size,
            charged=(int(self.base.sum()) * self.num_layers + spent + selection.probe) / size,
            runs=num_runs(self.base | repaired) - num_runs(self.base),
            computed=np.isin(np.arange(self.num_tokens), forward.completed) | earlier,
            candidate_scores=answers.scores(log_probabilities),
        )


class _Answers:
    """The rows after the prompt: the forced answer, then each candidate as a branch that sees only itself."""

    def __init__(self, trial: Trial, *, rank: bool, forced: bool) -> None:
        self._start = trial.num_tokens
        self.forced = trial.answer[:-1] if forced else token_ids([])
        self._candidates = trial.scenario.candidates if rank else ()
        branches = [self.forced, *(candidate[:-1] for candidate in self._candidates)]
        lengths = [len(branch) for branch in branches]
        self._ends = np.cumsum(lengths)
        self.tokens = np.concatenate(branches)
        self.slots = self._start + np.arange(int(self._ends[-1]))
        self.positions = self._start + np.concatenate([np.arange(length) for length in lengths])
        self._branch = np.repeat(np.arange(len(branches)), lengths)

    def visible(self, slots: NDArray[np.int64]) -> Mask:
        """(N, S) causal; after the prompt, each branch sees only itself."""
        mask = causal(np.concatenate([slots, self.slots]), self._start + len(self.slots))
        if len(self.slots):
            mask[len(slots) :, self._start :] &= self._branch[:, None] == self._branch[None, :]
        return mask

    def scores(self, log_probabilities: torch.Tensor) -> NDArray[np.float64]:
        """Mean log-likelihood per token of each candidate. Row 0 belongs to the prompt's last token."""
        found = []
        for start, end, candidate in zip(self._ends, self._ends[1:], self._candidates, strict=False):
            rows = [0, *range(1 + int(start), 1 + int(end))]
            chosen = torch.from_numpy(candidate.astype(np.int64))
            found.append(float(log_probabilities[rows, chosen].mean()))
        return np.array(found)


def forced_pass(
    model: LayeredModel, prompt: TokenIds, answer: TokenIds, *, chunk: int | None = None
) -> torch.Tensor:
    """(F, V) log-probabilities along an answer after a prompt, by the embedded engine's own passes."""
    tokens = token_ids(np.concatenate([prompt, answer[:-1]]))
    kv = model.model.new_sequence(len(tokens))
    starts = range(0, len(prompt) - 1, chunk or len(tokens))
    for start, end in pairwise([*starts, len(tokens)]):  # the last pass is the one that counts
        current = PartialPass(kv, (Span(start, end),))
        logits = model.model.logits(current, tokens[start:end], keep=len(answer))
    return torch.log_softmax(logits, dim=-1)
