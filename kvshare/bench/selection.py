"""
`kvshare bench selection`: what choosing repairs costs beside computing as many tokens.

    chosen       copies are laid out, a probe pass, the choice, the repairs behind it
    unselected   as many tokens in plain passes over KV that stands there: placeholders, and starts of pieces

On a random-weight Llama of about 100 M parameters; arms take turns in coming first. Prompts differ from the
stored one in a few places (`edited`), or have its passages in another order (`reordered`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from delta_tree import Span, TokenIds, merge, token_ids
from kvshare.bench.fidelity.shelf import Shelf
from kvshare.bench.harness import edited, environment, median, random_prompt, rounds
from kvshare.bench.random_models import llama
from kvshare.engines.embedded.model import EmbeddedModel
from kvshare.engines.embedded.prefill import Prefill
from kvshare.errors import ConfigError
from kvshare.kv.attention import PartialPass, take_pass
from kvshare.kv.sequence import SequenceKV
from kvshare.settings import Settings, load_settings
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.sharing.selection import choose_by_place

_VOCAB_SIZE = 1000
ARMS = ("chosen", "unselected")
_PASSAGES = 8
ALWAYS_CHOOSE = {"repair.rule": "attention", "sharing.max_deviation": 1e6}


def run(
    *, prompt_tokens: int = 4000, changed: float = 0.1, edits: int = 5, repeats: int = 7, seed: int = 0
) -> dict[str, Any]:
    """
    Medians of paired times over `repeats` prompts of each kind.

    Raises:  ConfigError for prompts of which nothing is shared
    """
    rng = np.random.default_rng(seed)
    settings = load_settings(overrides=ALWAYS_CHOOSE)
    length = prompt_tokens + 64
    network = llama("timing", max_position_embeddings=length, vocab_size=16384, seed=seed)
    model = EmbeddedModel(network, name="timing")
    kinds: dict[str, Callable[[TokenIds], TokenIds]] = {
        "edited": lambda donor: edited(
            donor, changed=changed, edits=edits, draw=lambda n: random_prompt(rng, n, _VOCAB_SIZE)
        ),
        "reordered": lambda donor: reordered(donor, rng, _VOCAB_SIZE),
    }
    return {
        "engine": "embedded",
        **{
            name: _measured(model, settings, rng, change, prompt_tokens, repeats)
            for name, change in kinds.items()
        },
        "environment": environment(),
    }


def _measured(
    model: EmbeddedModel,
    settings: Settings,
    rng: np.random.Generator,
    change: Callable[[TokenIds], TokenIds],
    num_tokens: int,
    repeats: int,
) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {name: [] for name in ARMS}
    plan = None
    for counts, order in rounds(ARMS, repeats):
        shelf, donor = Shelf(settings.sharing), random_prompt(rng, num_tokens, _VOCAB_SIZE)
        stored = model.new_sequence(num_tokens)
        _compute(model, stored, donor, (Span(0, num_tokens),), settings)
        shelf.store(donor, stored, NoPlan())
        tokens = change(donor)
        plan = ordered(shelf.plan(tokens, settings, can_probe=True))
        for name in order:
            if name == "chosen":
                taken = _chosen(model, shelf, tokens, plan, settings)
            else:
                taken = _unselected(model, tokens, plan, settings)
            if counts:
                seconds[name].append(taken)
    assert plan is not None
    return {**summary(seconds["chosen"], seconds["unselected"]), "tokens": token_counts(plan)}


def ordered(plan: Plan | NoPlan) -> Plan:
    """A plan that leaves repairs to be chosen. Raises ConfigError for any other."""
    if isinstance(plan, NoPlan) or plan.order is None:
        raise ConfigError("--prompt-tokens", f"nothing is repaired of such prompts: {plan}")
    return plan


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


def token_counts(plan: Plan) -> dict[str, int]:
    """Of the last of the plans."""
    return {
        "copied": plan.num_copied,
        "recomputed": plan.num_recomputed,
        "repaired": plan.num_repaired,
        "selecting": plan.num_selecting,
    }


def _chosen(model: EmbeddedModel, shelf: Shelf, tokens: TokenIds, plan: Plan, settings: Settings) -> float:
    kv = model.new_sequence(len(tokens))
    kv.k.zero_()  # pages that are there, as for the other arm
    kv.v.zero_()
    began = time.perf_counter()
    with torch.inference_mode():
        kv.lay_out(plan.copies, shelf.kv)
    prefill, logits = Prefill(model, tokens, plan, kv), None
    while logits is None:
        _, logits = prefill.advance(max_queries=settings.engine.prefill_chunk_tokens)
    return time.perf_counter() - began


def _unselected(model: EmbeddedModel, tokens: TokenIds, plan: Plan, settings: Settings) -> float:
    kv = model.new_sequence(len(tokens))
    kv.k.zero_()
    kv.v.zero_()
    spans = as_many(plan)
    began = time.perf_counter()
    _compute(model, kv, tokens, spans, settings)
    return time.perf_counter() - began


def as_many(plan: Plan) -> tuple[Span, ...]:
    """
    What is computed without a choice: the placeholders, and copied tokens at the starts of pieces.

    As many in all as the plan computes, to choose its repairs and behind that.
    """
    assert plan.order is not None
    order = replace(plan.order, probes=(), num_tokens=plan.order.num_tokens + plan.num_selecting)
    choice = choose_by_place(
        order, plan.placeholders, num_tokens=plan.num_tokens, first_approximate=plan.first_approximate
    )
    return merge([*plan.placeholders, *choice.repairs])


def _compute(
    model: EmbeddedModel, kv: SequenceKV, tokens: TokenIds, spans: tuple[Span, ...], settings: Settings
) -> None:
    current: PartialPass
    while spans:
        current, spans = take_pass(kv, spans, max_queries=settings.engine.prefill_chunk_tokens)
        model.compute(
            current, token_ids(np.concatenate([tokens[run.start : run.end] for run in current.runs]))
        )


def reordered(donor: TokenIds, rng: np.random.Generator, vocab_size: int) -> TokenIds:
    """Its passages in another order, and a question of its own."""
    passages = np.array_split(donor, _PASSAGES)
    order = [*range(1, _PASSAGES - 1, 2), *range(0, _PASSAGES - 1, 2)]
    question = random_prompt(rng, len(passages[-1]), vocab_size)
    return token_ids(np.concatenate([*(passages[number] for number in order), question]))
