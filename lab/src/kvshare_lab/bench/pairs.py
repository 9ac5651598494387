"""
`kvshare bench pairs`: edited and reordered prompts, asked over HTTP, compared with a full prefill.

The server has default settings and the default model in float32. The first prompt of a pair is stored, then
the second is asked twice: without any option, and with `"mode": "off"`. Greedy answers are compared token by
token, and so are the first token's 20 most likely candidates.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from scipy.special import rel_entr

from kvshare.embedded.engine import EmbeddedEngine
from kvshare_lab.bench.harness import Client, environment, serving
from kvshare_lab.bench.pair_texts import REORDERED, Messages, make_pairs
from kvshare_lab.fidelity.measures import num_agreed, rounded

_TOP = 20  # candidates of the first token, as many as the API gives
_PAIRS, _OWN_PAIRS = (120, 80), (5, 4)  # edits, reordered; with a folder of data and without
_NEARLY = (0.01, 0.05, 0.2)  # nats: full prefills whose answer was so close to another one are counted
_BEGINNING = 16  # tokens of an answer whose agreement is a figure of its own


@dataclass(frozen=True, slots=True)
class Answer:
    """Tokens, the log-probabilities of the candidates of each, and what was shared."""

    tokens: tuple[bytes, ...]
    candidates: tuple[Mapping[bytes, float], ...]
    prompt_tokens: int
    cached_tokens: int
    decision: str

    @property
    def closest(self) -> float:
        """Smallest lead of a first candidate over the second, nats: such a change makes another answer."""
        first_two = (sorted(listed.values(), reverse=True)[:2] for listed in self.candidates)
        return min((two[0] - two[1] for two in first_two if len(two) == 2), default=math.inf)


@dataclass(frozen=True, slots=True)
class Compared:
    """One pair's answers: over shared KV, and of a full prefill."""

    kind: str
    shared: Answer
    full: Answer

    @property
    def is_equal(self) -> bool:
        return self.shared.tokens == self.full.tokens

    @property
    def num_equal(self) -> int:
        return num_agreed(self.full.tokens, self.shared.tokens)

    def agreement(self, limit: int) -> float:
        """Share of the full answer's first `limit` tokens that come before the first difference."""
        return min(1.0, self.num_equal / max(1, len(self.full.tokens[:limit])))

    @property
    def lead(self) -> float | None:
        """
        At the first difference, how many nats the full prefill preferred its token to the shared answer's.

        A lower limit where that token is no candidate; None where nothing differs before an answer ends.
        """
        place = self.num_equal
        if place >= min(len(self.full.tokens), len(self.shared.tokens)):
            return None
        listed = self.full.candidates[place]
        return listed[self.full.tokens[place]] - listed.get(self.shared.tokens[place], min(listed.values()))


async def run(
    *,
    data: Path | None = None,
    model: str = "default",
    edits: int | None = None,
    reordered: int | None = None,
    answer_tokens: int = 40,
    max_deviation: float | None = None,
    seed: int = 0,
    threads: int | None = None,
) -> dict[str, Any]:
    """
    Figures by kind of pair, and over edits and reordered passages. `max_deviation`: overrides the setting.

    `edits`, `reordered`: how many pairs; by default 120 and 80, or 5 and 4 without a folder of data.
    Raises:  ConfigError where there are too few texts; EngineError where the model cannot be loaded
    """
    default_edits, default_reordered = _OWN_PAIRS if data is None else _PAIRS
    edits = default_edits if edits is None else edits
    reordered = default_reordered if reordered is None else reordered
    pairs = make_pairs(data, edits=edits, reordered=reordered, seed=seed)
    overrides = {"model.path": model, "engine.num_threads": threads, "sharing.max_deviation": max_deviation}
    compared = []
    async with serving(overrides) as (client, engine):
        ask = partial(_ask, client, engine)
        for pair in pairs:
            await ask(pair.stored, 1)
            shared = await ask(pair.asked, answer_tokens, no_store=True)
            full = await ask(pair.asked, answer_tokens, no_store=True, mode="off")
            compared.append(Compared(pair.kind, shared, full))
    kinds = dict.fromkeys(pair.kind for pair in pairs)
    return {
        "all_edits": _figures(compared, kinds.keys() - {*REORDERED}),
        "all_reordered": _figures(compared, REORDERED),
        "by_kind": {kind: _figures(compared, [kind]) for kind in kinds},
        "seed": seed,
        "environment": environment(),
    }


async def _ask(
    client: Client, engine: EmbeddedEngine, messages: Messages, limit: int, **sharing: object
) -> Answer:
    """`sharing`: members of the body's `kvshare`. It returns once what was stored can be found."""
    greedy = {"temperature": 0, "logprobs": True, "top_logprobs": _TOP, "max_tokens": limit}
    body = {"model": engine.card.model_id, "messages": list(messages), **greedy, "kvshare": sharing}
    async with client.post("/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        document = await response.json()
    await engine.settle()
    said = document["choices"][0]["logprobs"]["content"]
    usage = document["usage"]
    return Answer(  # tokens as bytes: as text, parts of different letters look alike
        tokens=tuple(bytes(token["bytes"]) for token in said),
        candidates=tuple(
            {bytes(top["bytes"]): top["logprob"] for top in token["top_logprobs"]} for token in said
        ),
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        decision=usage["kvshare"]["decision"],
    )


def candidates_kl(full: Mapping[bytes, float], shared: Mapping[bytes, float]) -> float:
    """A lower limit for the KL of one token, nats: all that not both list is one more candidate."""
    listed = full.keys() & shared.keys()
    p, q = (np.exp([own[token] for token in listed]) for own in (full, shared))
    rest = [max(1e-12, 1.0 - each.sum()) for each in (p, q)]
    return max(0.0, float(rel_entr([*p, rest[0]], [*q, rest[1]]).sum()))


def _figures(compared: Sequence[Compared], kinds: Collection[str]) -> dict[str, Any]:
    """Of the pairs of these kinds; `approximate` are those whose shared KV was not exact."""
    pairs = [each for each in compared if each.kind in kinds]
    approximate = [each for each in pairs if each.shared.decision == "approx"]
    leads = [lead for each in approximate if (lead := each.lead) is not None]
    first_kl = [candidates_kl(each.full.candidates[0], each.shared.candidates[0]) for each in approximate]
    found: dict[str, Any] = {"pairs": len(pairs), "approximate": len(approximate)}
    if pairs:
        found["equal"] = fmean(each.is_equal for each in pairs)
        found["prompt_tokens"] = fmean(each.full.prompt_tokens for each in pairs)
        found["nearly_tied"] = {
            f"{nats:g}": fmean(each.full.closest < nats for each in pairs) for nats in _NEARLY
        }
    if approximate:
        found["of_approximate"] = {
            "equal": fmean(each.is_equal for each in approximate),
            "used": sum(each.shared.cached_tokens for each in approximate)
            / sum(each.shared.prompt_tokens for each in approximate),
            "first_token_kl": rounded(fmean(first_kl)),
            "first_token_equal": fmean(each.agreement(1) for each in approximate),
            f"agreement_{_BEGINNING}": rounded(fmean(each.agreement(_BEGINNING) for each in approximate)),
            "agreement": rounded(fmean(each.agreement(len(each.full.tokens)) for each in approximate)),
            "lead_median": rounded(median(leads)) if leads else None,  # nats, of those that differ
        }
    return found
