"""
Finds out whether one candidate is clearly nearer to a prompt than all others, by a sample of its k-grams.

An agent's transcript is an earlier one with hundreds of edits, each of which may move all that follows. Then
one candidate has most of the prompt, and it alone need be aligned; of the others only those k-grams are
looked for that fit into what it leaves open.
"""

from collections.abc import Callable, Sequence

import numpy as np

from delta_tree.composition import Composition
from delta_tree.donors import Content
from delta_tree.kgrams import Ids
from delta_tree.near_duplicate import nearly_one_donor
from delta_tree.node import Node
from delta_tree.runs import common_prefix_length
from delta_tree.target import Target

_SAMPLED = 2048  # k-grams of a candidate; of half of them that stand in the prompt 1 in 45 by chance
_MOSTLY = 1 / 2  # of the prompt
_CLEARLY = 31 / 32  # of what the nearest candidate has: no other one has as much


def clearly_nearest(target: Target, prompts: Sequence[Ids], start: int) -> int | None:
    """
    Return which of the candidates has most of what follows the prompt's first `start` tokens; None if
    another has about as much, or none has much. Shapes: each of `prompts` (S,)
    """
    if not prompts or len(target.tokens) - start < target.min_run:
        return None
    hashes = target.hashes_of(prompts)
    steps = [max(1, len(own) // _SAMPLED) for own in hashes]
    samples = [own[::step] for own, step in zip(hashes, steps, strict=True)]
    passing = target.sieve_from(start).passing(np.concatenate(samples))
    numbers = np.diff(passing.searchsorted(np.cumsum([0, *map(len, samples)])))
    shares = numbers * np.array(steps)
    place = int(shares.argmax())
    others = np.delete(shares, place)
    if start + shares[place] < _MOSTLY * len(target.tokens):
        return None
    return None if (others > _CLEARLY * shares[place]).any() else place


def nearest_or_composed(
    target: Target, candidates: Sequence[Node], content: Callable[[Node], Content], *, may_move: bool
) -> tuple[int | None, Composition | None]:
    """
    Return which candidate is clearly the nearest, or a composition of a near-duplicate. Both may be None.
    """
    prompts = [node.token_ids for node in candidates]
    exact_lengths = [
        common_prefix_length(tokens[: node.exact_length], target.tokens)
        for tokens, node in zip(prompts, candidates, strict=True)
    ]
    nearly = nearly_one_donor(target, candidates, content, exact_lengths, may_move=may_move)
    is_left = nearly is None and may_move
    return clearly_nearest(target, prompts, max(exact_lengths)) if is_left else None, nearly
