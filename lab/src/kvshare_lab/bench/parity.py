"""
`kvshare bench parity`: how far KVShare's computation is from the model's own, where both must be the same.

In float32, on random models of every supported architecture. The reference is transformers' forward pass with
its eager attention and no cache. What is compared with it, unless another reference is named:
    all_placeholders   every position computed in our pass
    scattered          scattered runs computed over correct KV
    left_to_right      runs in one pass, compared with the same runs one by one, over another prompt's KV
    identity           a prompt's KV cut out, stored and written back, compared with itself
    prefix             an exact prefix from a stored prompt, the rest computed
    moved_layer_0      keys of layer 0 moved to another position, compared with keys computed there
"""

from typing import Any

import numpy as np
import torch

from delta_tree import Span, TokenIds, token_ids
from kvshare.embedded.model import EmbeddedModel
from kvshare.kv.sequence import SequenceKV
from kvshare_lab.bench.direct import SEGMENT, compute, copied, scattered_runs
from kvshare_lab.bench.harness import random_prompt
from kvshare_lab.bench.random_models import ARCHITECTURES, VOCAB_SIZE, tiny_model


def run(*, tokens: int = 400, seed: int = 0) -> dict[str, Any]:
    """The largest absolute error per oracle and architecture, and over all: `max_abs_logit_error`."""
    errors = {name: _oracles(name, tokens, seed) for name in ARCHITECTURES}
    return {
        "dtype": "float32",
        "max_abs_logit_error": max(max(found.values()) for found in errors.values()),
        "errors": errors,
    }


def _oracles(name: str, num_tokens: int, seed: int) -> dict[str, float]:
    rng = np.random.default_rng(seed)
    tokens, other = (random_prompt(rng, num_tokens, VOCAB_SIZE) for _ in range(2))
    runs = (*scattered_runs(rng, num_tokens), Span(num_tokens - 2, num_tokens))
    model = EmbeddedModel(tiny_model(name, seed=seed), name=name)
    expected = _reference(name, tokens, seed)
    positions = torch.cat([torch.arange(run.start, run.end) for run in runs])
    whole, cut = Span(0, num_tokens), num_tokens // 2
    correct, foreign, written = (model.new_sequence(num_tokens) for _ in range(3))
    everything = compute(model, correct, (whole,), tokens)
    scattered = compute(model, _poisoned(correct, runs), runs, tokens)
    compute(model, foreign, (whole,), other)
    joint = compute(model, _poisoned(foreign, runs), runs, tokens)
    apart_kv = _poisoned(foreign, runs)
    apart = torch.cat([compute(model, apart_kv, (run,), tokens) for run in runs])
    written.write_copies([copied(0, num_tokens, target_start=0)], {SEGMENT: correct.cut(whole)})
    behind = (Span(cut, num_tokens),)
    tail = compute(model, _poisoned(written, behind), behind, tokens)
    return {
        "all_placeholders": _distance(everything, expected),
        "scattered": _distance(scattered, expected[positions]),
        "left_to_right": _distance(joint, apart),
        "identity": max(_distance(written.k, correct.k), _distance(written.v, correct.v)),
        "prefix": _distance(tail, expected[cut:]),
        "moved_layer_0": _moved_error(model, tokens),
    }


def _poisoned(kv: SequenceKV, runs: tuple[Span, ...]) -> SequenceKV:
    """A copy with huge numbers in the slots of these runs: reading one before it is written shows."""
    other = kv.fork(kv.capacity)
    for run in runs:
        other.k[:, run.start : run.end] = 1e4
        other.v[:, run.start : run.end] = 1e4
    return other


def _reference(name: str, tokens: TokenIds, seed: int) -> torch.Tensor:
    """Logits (T, V) of the untouched model."""
    model = tiny_model(name, seed=seed)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0]
    return logits.float()


def _moved_error(model: EmbeddedModel, tokens: TokenIds) -> float:
    """Infinite where the model's rows cannot be moved."""
    if model.unsupported_reason:
        return float("inf")
    num_tokens, shift = min(64, len(tokens)), min(173, len(tokens))
    near, far = model.new_sequence(num_tokens), model.new_sequence(num_tokens + shift)
    padded = token_ids(np.concatenate([tokens[:shift], tokens[:num_tokens]]))
    compute(model, near, (Span(0, num_tokens),), tokens)
    compute(model, far, (Span(0, num_tokens + shift),), padded)
    return max(
        _distance(plane.moved(here, shift)[0], there[0, shift:])
        for plane, here, there in zip(model.layout.planes, near.planes, far.planes, strict=True)
    )


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).abs().max())
