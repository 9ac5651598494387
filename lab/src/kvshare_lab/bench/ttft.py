"""
`kvshare bench ttft`: time to first token of a prompt of which a stored one differs in a few places.

The arms take turns in one process, on a random-weight Llama of about 100 M parameters and random tokens, or
on a given model and real text:
    full           nothing is shared
    shared         KVShare: nomination, planning, copying, rotation and partial attention included
    exact_prefix   only the tokens before the first difference: what a prefix cache reuses
    ideal          an equal-compute prefix hit: a prompt of the same length whose prefix is an exact hit and
                   which computes as many tokens as `shared` did (the key is older than the name)
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from delta_tree import TokenIds, token_ids
from kvshare.chat_model import EXAMPLE_TEXT
from kvshare.embedded.engine import EmbeddedEngine
from kvshare.embedded.model import EmbeddedModel
from kvshare.errors import ConfigError
from kvshare.requests import SharingMode
from kvshare_lab.bench.bound import Bound, ModelSize, bound_figures, copied_bytes_per_s, spans_of
from kvshare_lab.bench.harness import Answer, ask, edited, environment, median, random_prompt, running_engine
from kvshare_lab.bench.random_models import timing_model
from kvshare_lab.demo_model.pairs import near_duplicate_pairs

_EQUAL_COMPUTE = "ideal"  # the arm's key
_ARMS = ("full", "shared", "exact_prefix", _EQUAL_COMPUTE)
_PARTS = ("exact", "copied", "recomputed", "repaired")
_FORMS = 64  # behind the example text
_VOCAB_SIZE = 1000  # of the tokens drawn; the model's own is larger


async def run(
    *,
    prompt_tokens: int = 2000,
    changed: float = 0.1,
    edits: int = 5,
    repeats: int = 5,
    seed: int = 0,
    model: str | None = None,
    family: str = "llama",
) -> dict[str, Any]:
    """
    Medians over `repeats` recipients, each new to the store. `model`: what `model.path` may be; None: random
    weights in float32, of a `family` of `kvshare_lab.bench.random_models`.

    Raises:  ConfigError for prompts longer than the real text is, and for an unknown family; ModelError
    """
    rng = np.random.default_rng(seed)
    rows, bounds = [], []
    given = {} if model is None else {"model.path": model, "model.dtype": "auto"}
    random_model = timing_model(family, prompt_tokens=prompt_tokens, seed=seed) if model is None else None
    async with running_engine(random_model, given) as engine:
        served = engine.server.shared_model
        bound_of = partial(
            Bound.of,
            ModelSize.of_network(served.network, served.layout.reaches),
            num_tokens=prompt_tokens,
            bytes_per_token=served.layout.bytes_per_token,
            bytes_per_s=copied_bytes_per_s(torch.get_num_threads()),
        )
        donor, draw = _text(engine, rng, prompt_tokens, is_real=model is not None)
        await ask(engine, donor, mode=SharingMode.OFF, store=True)
        for _ in range(repeats + 1):
            recipient = edited(donor, changed=changed, edits=edits, draw=draw)
            full = await ask(engine, recipient, mode=SharingMode.OFF)
            with _computed_positions(served) as passes:
                shared = await ask(engine, recipient, mode=SharingMode.APPROX)
            prefix = await ask(engine, recipient, mode=SharingMode.EXACT)
            num_computed, num_copied = shared.report.num_missed, shared.report.num_cached
            same_head = token_ids(np.concatenate([donor[:num_copied], draw(num_computed)]))
            equal_compute = await ask(engine, same_head, mode=SharingMode.EXACT)
            rows.append(dict(zip(_ARMS, (full, shared, prefix, equal_compute), strict=True)))
            # Where repairs are chosen, probes are computed as well. The first positions cost the least.
            computed = spans_of(np.unique(np.concatenate(passes))[:num_computed])
            bounds.append(bound_of(computed, num_copied=num_copied))
    return {
        "engine": "embedded",
        "model": served.name if model else f"random weights, 100 M, {family}",
        "dtype": str(served.layout.dtype).removeprefix("torch."),
        **_summary(rows[1:], bounds[1:], prompt_tokens),  # after the first, caches and allocator are warm
        "environment": environment(),
    }


def _text(
    engine: EmbeddedEngine, rng: np.random.Generator, num_tokens: int, *, is_real: bool
) -> tuple[TokenIds, Callable[[int], TokenIds]]:
    """The donor, and what draws other tokens: at random, or from the example text and our own forms."""
    if not is_real:
        draw_random = partial(random_prompt, rng, vocab_size=_VOCAB_SIZE)
        return draw_random(num_tokens), draw_random
    pairs = [next(near_duplicate_pairs(seed=number, count=1)) for number in range(_FORMS)]
    forms = ["\n\n" + pair.donor_messages[-1]["content"] for pair in pairs]
    texts = [EXAMPLE_TEXT.read_text(encoding="utf-8"), *forms]
    tokens = np.concatenate([engine.server.encoder.encode_text(text).token_ids for text in texts])
    if len(tokens) < 2 * num_tokens:
        problem = f"prompts of real text have at most {len(tokens) // 2:,} tokens, got {num_tokens:,}"
        raise ConfigError("--prompt-tokens", problem)
    others = tokens[num_tokens:]

    def draw(length: int) -> TokenIds:
        start = int(rng.integers(len(others) - length + 1))
        return token_ids(others[start : start + length])

    return token_ids(tokens[:num_tokens]), draw


@contextmanager
def _computed_positions(model: EmbeddedModel) -> Iterator[list[NDArray[np.int64]]]:
    """The positions that each forward pass in this block computes."""
    passes: list[NDArray[np.int64]] = []

    def note(_: torch.nn.Module, __: tuple[Any, ...], given: dict[str, Any]) -> None:
        passes.append(given["position_ids"].flatten().cpu().numpy())

    with model.network.register_forward_pre_hook(note, with_kwargs=True):
        yield passes


def _summary(rows: list[dict[str, Answer]], bounds: list[Bound], num_tokens: int) -> dict[str, Any]:
    """
    `of_bound`: share of the bound's speedup that is reached. `of_equal_compute`: time of the equal-compute
    prefix hit over that of `shared`. The last recipient's tokens and stages stand for all.
    """
    ttft = {name: median([row[name].first_token_s for row in rows]) for name in _ARMS}
    speedups = {name: ttft["full"] / seconds for name, seconds in ttft.items()}
    last = rows[-1]["shared"]
    report = last.report
    of_equal_compute = ttft[_EQUAL_COMPUTE] / ttft["shared"]
    return {
        "speedup": speedups["shared"],
        **bound_figures(bounds, full_s=ttft["full"], shared_s=ttft["shared"]),
        "equal_compute_speedup": speedups[_EQUAL_COMPUTE],
        "of_equal_compute": of_equal_compute,
        "ideal_speedup": speedups[_EQUAL_COMPUTE],  # these two under their older names
        "of_ideal": of_equal_compute,
        "exact_prefix_speedup": speedups["exact_prefix"],
        "recomputed_fraction": report.num_missed / num_tokens,
        "tokens": {part: getattr(report, f"num_{part}") for part in _PARTS},
        "decision": report.decision,
        "median_ttft_s": ttft,
        "shared_stage_ms": {stage: 1e3 * value for stage, value in last.finished.stage_seconds.items()},
    }
