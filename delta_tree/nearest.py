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
from delta_tree.kgrams import Ids, some_hashes
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
    sizes = [max(len(tokens) - target.min_run + 1, 0) for tokens in prompts]
    steps = [max(1, size // _SAMPLED) for size in sizes]
    samples = [some_hashes(tokens, target.min_run, step) for tokens, step in zip(prompts, steps, strict=True)]
    passing = target.sieve_from(start).passing(np.concatenate(samples))
    numbers = np.diff(passing.searchsorted(np.cumsum([0, *map(len, samples)])))
    shares = numbers * np.array(steps)
    place = int(shares.argmax())
    others = np.delete(shares, place)
    if start + shares[place] < _MOSTLY * len(target.tokens):
        return None
    return None if (others > _CLEARLY * shares[place]).any() else place


def exact_lengths_of(target: Target, candidates: Sequence[Node]) -> list[int]:
    """Return for how many leading tokens of the prompt each of the candidates has exact KV."""
    return [common_prefix_length(node.token_ids[: node.exact_length], target.tokens) for node in candidates]


def without_others(
    target: Target, candidates: Sequence[Node], content: Callable[[Node], Content], nearest: int
) -> tuple[Sequence[Node], int]:
    """
    Return only the nearest candidate, and the first one with the exact prefix if it has less of that; and the
    place of the nearest one among them. All candidates if of these two anything may not be copied.
    """
    exact_lengths = exact_lengths_of(target, candidates)
    start = max(exact_lengths)
    holder = nearest if exact_lengths[nearest] == start else exact_lengths.index(start)
    places = sorted({holder, nearest})
    contents = [content(candidates[place]) for place in places]
    if any(
        own.visible is not candidates[place].token_ids or own.exact_length != exact_lengths[place]
        for own, place in zip(contents, places, strict=True)
    ):
        return candidates, nearest
    return [candidates[place] for place in places], places.index(nearest)


def nearest_or_composed(
    target: Target, candidates: Sequence[Node], content: Callable[[Node], Content], *, may_move: bool
) -> tuple[int | None, Composition | None]:
    """
    Return which candidate is clearly the nearest, or a composition of a near-duplicate. Both may be None.
    """
    prompts, exact_lengths = [node.token_ids for node in candidates], exact_lengths_of(target, candidates)
    nearly = nearly_one_donor(target, candidates, content, exact_lengths, may_move=may_move)
    is_left = nearly is None and may_move
    return clearly_nearest(target, prompts, max(exact_lengths)) if is_left else None, nearly
