"""
One plan, ready for any rule: what is copied, what is computed anyway, the truth, and a pass with repairs.

    b          layer-tokens of repaired positions / (layers x prompt tokens)
    charged    layer-tokens that get fresh Q, K, V, selection passes included / the same

Every rule gets the same donors, plan and rotation. Positions without a copy and the last `tail` of the prompt
are computed in every arm; they are the `base`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from delta_tree import Copy, Span, TokenIds, token_ids
from kvshare.bench.fidelity.layered import Intervention, LayeredModel, Mask, Pass, causal
from kvshare.bench.fidelity.measures import free_running
from kvshare.bench.fidelity.scenario import Scenario
from kvshare.bench.fidelity.shelf import Prefill, Shelf, covered, prefill
from kvshare.kv.attention import PartialPass
from kvshare.kv.sequence import SequenceKV
from kvshare.settings import Settings
from kvshare.sharing.plan import clip
from kvshare.sharing.selection import num_runs

NUM_FORCED = 16  # tokens of the full prefill's own answer that every arm is forced along


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """
    What a rule wants computed again.

    `rows` (T,) for all layers, or (L, T); `probe`: layer-tokens of selection passes; `copies`: another layout
    than the plan's; `kv`: what stands in the slots at the start, where that is not what is laid; `kept` (T,):
    rows of the base that a pass before this one has computed there.
    """

    rows: NDArray[np.bool_]
    probe: float = 0.0
    intervention: Intervention | None = None
    copies: tuple[Copy, ...] | None = None
    kv: SequenceKV | None = None
    kept: Mask | None = None


@dataclass(slots=True, eq=False)
class Outcome:
    """What an arm came to: log-probabilities behind the prompt and its forced answer, and its cost."""

    kv: SequenceKV
    log_probabilities: torch.Tensor  # (F, V)
    b: float
    charged: float
    runs: int  # further stretches that the repair adds to the plan's own
    computed: Mask  # (T,) positions whose KV is fresh in all layers
    candidate_scores: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))  # nats a token


class Trial:
    """A scenario whose prompts are computed and whose plan is made."""

    def __init__(self, scenario: Scenario, model: LayeredModel, settings: Settings, shelf: Shelf) -> None:
        self.scenario, self.model, self.settings, self.shelf = scenario, model, settings, shelf
        prompt = scenario.prompt
        self.num_tokens, self.num_layers = len(prompt), model.num_layers
        composition = shelf.compose(prompt.token_ids)
        self.exact_length = min(composition.exact_length, self.num_tokens - 1)
        whole = Span(0, self.num_tokens - 1)  # the last token is always computed
        self.copies = tuple(part for copy in composition.copies if (part := clip(copy, whole)))
        laid = covered([copy.target for copy in self.copies], self.num_tokens)
        tail = np.arange(self.num_tokens) >= self.num_tokens - settings.repair.tail
        exact = np.arange(self.num_tokens) < self.exact_length
        self.placeholders: Mask = ~laid
        self.base: Mask = ~laid | (tail & ~exact)
        self.copied: Mask = laid & ~tail & ~exact  # what a rule may choose from
        self._answer, self._answer_limit = token_ids([]), 0

    @cached_property
    def foreign(self) -> tuple[Copy, ...]:
        """The approximate copies."""
        whole = Span(self.exact_length, self.num_tokens)
        return tuple(part for copy in self.copies if (part := clip(copy, whole)))

    @cached_property
    def full(self) -> Prefill:
        """The prompt, computed in full."""
        return prefill(self.model, self.scenario.prompt, room=NUM_FORCED)

    @cached_property
    def answer(self) -> TokenIds:
        """The full prefill's own greedy answer, as many tokens as arms are forced along or fewer."""
        return self.free_answer(NUM_FORCED)

    def free_answer(self, limit: int) -> TokenIds:
        """The full prefill's own greedy answer, at most so many tokens."""
        if limit > self._answer_limit:
            self._answer_limit, (kv, last) = limit, (self.full.kv, self.full.last)
            self._answer = free_running(self.model, kv, last, num_tokens=self.num_tokens, limit=limit)
        return self._answer[:limit]

    @cached_property
    def truth(self) -> torch.Tensor:
        """(F, V) log-probabilities along the answer: the engine's own pass over prompt and answer."""
        return self.full_pass(self.scenario.prompt.token_ids)

    def full_pass(self, prompt: TokenIds, *, chunk: int | None = None) -> torch.Tensor:
        """(F, V) along the answer, behind any prompt, computed by the engine; in chunks where asked."""
        return forced_pass(self.model, prompt, self.answer, chunk=chunk)

    @cached_property
    def laid(self) -> SequenceKV:
        """The plan's copies in their slots."""
        return self.lay(self.copies)

    def lay(self, copies: Sequence[Copy]) -> SequenceKV:
        """A sequence with these copies, and room for the answer."""
        kv = self.model.model.new_sequence(self.num_tokens + self._room)
        kv.k.zero_()
        kv.v.zero_()
        kv.lay_out(copies, self.shelf.kv)
        return kv

    @property
    def _room(self) -> int:
        return NUM_FORCED + sum(len(candidate) for candidate in self.scenario.candidates)

    def base_layer_tokens(self) -> int:
        """What every arm computes, in layer-tokens."""
        return int(self.base.sum()) * self.num_layers

    @property
    def guided(self) -> NDArray[np.float32]:
        """
        (L, N, T) attention of the base's rows to every slot, mean over heads: a pass over the base alone.

        In a server: the first pass; the base is computed again with the repairs.
        """
        return self._guided[0]

    @property
    def guided_kv(self) -> SequenceKV:
        """What stands in the slots behind that pass."""
        return self._guided[1]

    @cached_property
    def _guided(self) -> tuple[NDArray[np.float32], SequenceKV]:
        return self.watch(self.base)

    def watch(self, rows: Mask) -> tuple[NDArray[np.float32], SequenceKV]:
        """
        A pass over these rows and what is laid: (L, N, T) their attention to every slot, mean over heads, and
        the KV behind it.
        """
        slots = rows.nonzero()[0]
        seen = np.zeros((self.num_layers, len(slots), self.num_tokens), np.float32)

        def see(layer: int, weights: torch.Tensor) -> None:
            seen[layer] = weights.mean(0).cpu()

        kv = self.laid.fork(self.num_tokens)
        current = Pass(self.scenario.prompt.token_ids[slots], slots, weights=see)
        self.model.run(kv, current, logits_of=np.array([len(slots) - 1]))
        return seen, kv

    @cached_property
    def key_deviation(self) -> torch.Tensor:
        """(L, T, H, D) how far the laid keys are from the full prefill's; 0 where nothing is laid."""
        return self._deviation(self.full.kv.k, self.laid.k)

    @cached_property
    def value_deviation(self) -> torch.Tensor:
        """(L, T, H, D), the same of values."""
        return self._deviation(self.full.kv.v, self.laid.v)

    def _deviation(self, true: torch.Tensor, laid: torch.Tensor) -> torch.Tensor:
        difference = (true[:, : self.num_tokens] - laid[:, : self.num_tokens]).cpu()
        difference[:, torch.from_numpy(self.placeholders)] = 0.0
        return difference

    def take_truth(self, other: Trial) -> None:
        """Use what another trial of the same prompt has computed in full."""
        self.full, self.answer, self.truth = other.full, other.answer, other.truth

    def run(self, selection: Selection, *, rank: bool = False, forced: bool = True) -> Outcome:
        """One arm. `rank`: score the candidates too; not `forced`: only compute the prompt."""
        by_layer = selection.rows if selection.rows.ndim == 2 else None
        union = selection.rows.any(axis=0) if by_layer is not None else selection.rows
        kept = np.zeros(self.num_tokens, np.bool_) if selection.kept is None else selection.kept
        repaired = union & ~self.base
        slots = (self.base & ~kept | repaired).nonzero()[0]
        kv = self._kv_for(selection)
        tail = _Tail(self, rank=rank, forced=forced)
        current = Pass(
            token_ids(np.concatenate([self.scenario.prompt.token_ids[slots], tail.tokens])),
            np.concatenate([slots, tail.slots]),
            positions=np.concatenate([slots, tail.positions]),
            visible=tail.visible(slots),
            repaired=np.concatenate([repaired[slots], np.zeros(len(tail.slots), np.bool_)]),
            at_layer=_rows_at(by_layer, repaired, slots, len(tail.slots)),
            intervention=selection.intervention,
        )
        wanted = np.arange(len(slots) - 1, len(slots) + len(tail.slots))
        log_probabilities = self.model.run(kv, current, logits_of=wanted)
        spent = sum(current.num_computed)
        size = self.num_layers * self.num_tokens
        base = self.base_layer_tokens()
        return Outcome(
            kv=kv,
            log_probabilities=log_probabilities[: len(tail.forced) + 1],
            b=spent / size,
            charged=(base + spent + selection.probe) / size,
            runs=num_runs(self.base | repaired) - num_runs(self.base),
            computed=np.isin(np.arange(self.num_tokens), current.left) | kept,
            candidate_scores=tail.scores(log_probabilities),
        )

    def _kv_for(self, selection: Selection) -> SequenceKV:
        if selection.copies is not None:
            return self.lay(selection.copies)
        return (selection.kv or self.laid).fork(self.num_tokens)


class _Tail:
    """The rows behind the prompt: the forced answer, then each candidate as a branch of its own."""

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
        """(N, S) causal, each branch behind the prompt by itself."""
        mask = causal(np.concatenate([slots, self.slots]), self._start + len(self.slots))
        if len(self.slots):
            mask[len(slots) :, self._start :] &= self._branch[:, None] == self._branch[None, :]
        return mask

    def scores(self, log_probabilities: torch.Tensor) -> NDArray[np.float64]:
        """Mean log-likelihood a token of each candidate. Row 0 stands behind the prompt's last token."""
        found = []
        for start, end, candidate in zip(self._ends, self._ends[1:], self._candidates, strict=False):
            rows = [0, *range(1 + int(start), 1 + int(end))]
            chosen = torch.from_numpy(candidate.astype(np.int64))
            found.append(float(log_probabilities[rows, chosen].mean()))
        return np.array(found)


def forced_pass(
    model: LayeredModel, prompt: TokenIds, answer: TokenIds, *, chunk: int | None = None
) -> torch.Tensor:
    """(F, V) log-probabilities along an answer behind a prompt, by the embedded engine's own passes."""
    tokens = token_ids(np.concatenate([prompt, answer[:-1]]))
    kv = model.model.new_sequence(len(tokens))
    start, first = 0, len(prompt) - 1
    while chunk is not None and start + chunk < first:
        span = Span(start, start + chunk)
        model.model.logits(PartialPass(kv, (span,)), tokens[span.start : span.end], keep=1)
        start += chunk
    span = Span(start, len(tokens))
    logits = model.model.logits(PartialPass(kv, (span,)), tokens[start:], keep=len(answer))
    return torch.log_softmax(logits, dim=-1)


def _rows_at(by_layer: Mask | None, repaired: Mask, slots: NDArray[np.int64], num_behind: int) -> Mask | None:
    """(L, N): repaired rows where their layer wants them, all others everywhere."""
    if by_layer is None:
        return None
    wanted: Mask = by_layer[:, slots] | ~repaired[slots]
    return np.hstack([wanted, np.ones((len(wanted), num_behind), np.bool_)])
