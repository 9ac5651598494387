"""
`kvshare bench selection`: what choosing repairs costs beside computing as many tokens.

    chosen       copies are written, then a probe pass, the choice, and the repairs
    unselected   as many tokens are computed in plain passes, with all slots filled: the placeholders, and
                 copied tokens at the starts of pieces

On a random-weight Llama of about 100 M parameters. Prompts differ from the stored one in a few places
(`edited`), or have its passages in another order (`reordered`).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import numpy as np
import torch

from delta_tree import Span, TokenIds, merge, token_ids
from kvshare.embedded.model import EmbeddedModel
from kvshare.errors import ConfigError
from kvshare.settings import load_settings
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.sharing.selection import choose_by_place
from kvshare_lab.bench.direct import prefilled
from kvshare_lab.bench.harness import edited, environment, median, random_prompt, rounds
from kvshare_lab.bench.random_models import timing_model
from kvshare_lab.fidelity.stored_prompts import StoredPrompts

_VOCAB_SIZE = 1000
ARMS = ("chosen", "unselected")
_PASSAGES = 8
SETTINGS = load_settings(overrides={"repair.rule": "attention", "sharing.max_deviation": 1e6})
"""Those of a server that always chooses its repairs."""


def run(
    *, prompt_tokens: int = 4000, changed: float = 0.1, edits: int = 5, repeats: int = 7, seed: int = 0
) -> dict[str, Any]:
    """Medians of times over `repeats` prompts of each kind. Raises ConfigError where nothing is shared."""
    rng = np.random.default_rng(seed)
    draw = partial(random_prompt, rng, vocab_size=_VOCAB_SIZE)
    model = EmbeddedModel(timing_model(prompt_tokens=prompt_tokens, seed=seed), name="timing")
    kinds = {
        "edited": partial(edited, changed=changed, edits=edits, draw=draw),
        "reordered": partial(reordered, rng=rng, vocab_size=_VOCAB_SIZE),
    }
    measured = {
        kind: _measured(model, partial(draw, prompt_tokens), change, repeats)
        for kind, change in kinds.items()
    }
    return {"engine": "embedded", **measured, "environment": environment()}


def _measured(
    model: EmbeddedModel, draw: Callable[[], TokenIds], change: Callable[[TokenIds], TokenIds], repeats: int
) -> dict[str, Any]:
    """One kind of prompts, each the change of a donor that is new."""
    seconds: dict[str, list[float]] = {name: [] for name in ARMS}
    for counts, order in rounds(ARMS, repeats):
        prompts, donor = StoredPrompts(SETTINGS.sharing), draw()
        kv, tokens = model.new_sequence(len(donor)), change(donor)
        prefilled(model, donor, NoPlan(), kv)
        prompts.store(donor, kv, NoPlan())
        recipient = Recipient.of(prompts, tokens)
        for name in order:
            taken = _seconds(model, recipient, is_chosen=name == "chosen")
            if counts:
                seconds[name].append(taken)
    return {**summary(seconds["chosen"], seconds["unselected"]), "tokens": recipient.token_counts}


@dataclass(frozen=True, slots=True, eq=False)
class Recipient:
    """A prompt with a plan whose repairs are still to be chosen."""

    tokens: TokenIds
    plan: Plan
    prompts: StoredPrompts

    @classmethod
    def of(cls, prompts: StoredPrompts, tokens: TokenIds) -> Self:
        """Raises ConfigError where nothing is left to choose."""
        plan = prompts.plan(tokens, SETTINGS, can_probe=True)
        if isinstance(plan, NoPlan) or plan.order is None:
            raise ConfigError("--prompt-tokens", f"nothing is repaired of such prompts: {plan}")
        return cls(tokens, plan, prompts)

    @property
    def unselected(self) -> tuple[Span, ...]:
        """Placeholders and starts of pieces, as many tokens as the plan computes, to choose repairs too."""
        plan, order = self.plan, self.plan.order
        assert order is not None
        order = replace(order, probes=(), num_tokens=order.num_tokens + plan.num_selecting)
        choice = choose_by_place(
            order, plan.placeholders, num_tokens=plan.num_tokens, first_approximate=plan.first_approximate
        )
        return merge([*plan.placeholders, *choice.repairs])

    @property
    def token_counts(self) -> dict[str, int]:
        names = ("copied", "recomputed", "repaired", "selecting")
        return {name: getattr(self.plan, f"num_{name}") for name in names}


def summary(chosen: Sequence[float], unselected: Sequence[float]) -> dict[str, Any]:
    """Of paired times in seconds."""
    ratios = [a / b for a, b in zip(chosen, unselected, strict=True)]
    return {
        "ratio": median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "chosen_ms": 1e3 * median(chosen),
        "unselected_ms": 1e3 * median(unselected),
    }


def _seconds(model: EmbeddedModel, recipient: Recipient, *, is_chosen: bool) -> float:
    plan, kv = recipient.plan, model.new_sequence(len(recipient.tokens))
    kv.k.zero_()  # so that both arms write to pages that are there already
    kv.v.zero_()
    if not is_chosen:
        plan = replace(plan, copies=(), placeholders=recipient.unselected, repairs=(), order=None)
    began = time.perf_counter()
    with torch.inference_mode():
        kv.write_copies(plan.copies, recipient.prompts.kv)
    prefilled(model, recipient.tokens, plan, kv, max_queries=SETTINGS.engine.prefill_chunk_tokens)
    return time.perf_counter() - began


def reordered(donor: TokenIds, rng: np.random.Generator, vocab_size: int) -> TokenIds:
    """The donor's passages in another order, with another question behind them."""
    passages = np.array_split(donor, _PASSAGES)
    order = [*range(1, _PASSAGES - 1, 2), *range(0, _PASSAGES - 1, 2)]
    question = random_prompt(rng, len(passages[-1]), vocab_size)
    return token_ids(np.concatenate([*(passages[number] for number in order), question]))
