"""
Chooses the next token from logits, on the CPU, for one sequence at a time. The steps are in vLLM's order:

    a grammar's mask, min_tokens, logit_bias, repetition, frequency and presence penalty   `Sampler`
    temperature, min_p, top_k, top_p                                                       `probabilities`
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields

import torch

from delta_tree import TokenIds
from kvshare.engine import SamplingParams

_NEVER = torch.tensor(-torch.inf)
_GREEDY = 1e-5  # temperatures below it count as 0, as in vLLM


@dataclass(frozen=True, slots=True)
class Draw:
    """The parameters by which tokens are drawn. The defaults are OpenAI's: the model's own distribution."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    repetition_penalty: float = 1.0


DRAW_FIELDS = tuple(field.name for field in fields(Draw))


def resolve(params: SamplingParams, model_defaults: Mapping[str, float]) -> Draw:
    """
    Take each value from the request, or else from the model's generation config, or else OpenAI's default.

    As in vLLM, the config's `do_sample` is ignored: it concerns calls from Python.
    """
    requested = {name: value for name in DRAW_FIELDS if (value := getattr(params, name)) is not None}
    return Draw(**{**model_defaults, **requested})


def probabilities(logits: torch.Tensor, draw: Draw) -> torch.Tensor:
    """
    Return the distribution from which a token is drawn at a temperature above 0.

    Shapes:  logits (V,) float32, not changed -> (V,) float32, of sum 1
    """
    logits = logits / draw.temperature
    if draw.min_p > 0.0:
        shares = logits.softmax(dim=-1)
        logits = logits.masked_fill(shares < draw.min_p * shares.max(), -torch.inf)
    if 0 < draw.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(draw.top_k).values[-1], -torch.inf)
    shares = logits.softmax(dim=-1)
    if draw.top_p < 1.0:
        ordered, indices = shares.sort(descending=True)
        before = ordered.cumsum(dim=-1) - ordered
        before[0] = -1.0  # the likeliest token stays, even with top_p = 0
        shares[indices[before >= draw.top_p]] = 0.0
        shares /= shares.sum()
    return shares


class Sampler:
    """Samples the tokens of one choice. The same seed gives the same tokens for the same logits."""

    def __init__(
        self, params: SamplingParams, draw: Draw, *, choice: int, prompt: TokenIds, ends: Collection[int]
    ) -> None:
        """`ends`: tokens that are not sampled before the answer has `min_tokens` tokens."""
        self._params = params
        self._draw = draw
        self._prompt = prompt
        self._ends = torch.tensor(sorted(ends), dtype=torch.int64)
        self._counts: Counter[int] = Counter()
        self._seen: torch.Tensor | None = None  # (V,) bool: tokens of prompt and answer
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed((params.seed + choice) % 2**63)

    def sample(self, logits: torch.Tensor, forbidden: torch.Tensor | None = None) -> int:
        """
        Sample the next token id. `forbidden`: the tokens that the grammar does not allow.

        Shapes:  logits (V,) float32, not changed; forbidden (V,) bool
        """
        logits = logits.cpu()
        if forbidden is not None:
            logits = torch.where(forbidden, _NEVER, logits)  # in 2/3 of the time of `masked_fill`
        logits = self._penalised(self._biased(self._lengthened(logits)))
        if self._draw.temperature < _GREEDY:
            token_id = int(logits.argmax())
        else:
            shares = probabilities(logits, self._draw)
            token_id = int(torch.multinomial(shares, 1, generator=self._generator))
        self._counts[token_id] += 1
        if self._seen is not None:
            self._seen[token_id] = True
        return token_id

    def _lengthened(self, logits: torch.Tensor) -> torch.Tensor:
        """Mask the tokens that end an answer while it is too short, unless its grammar allows no others."""
        if self._counts.total() >= self._params.min_tokens:
            return logits
        longer = logits.index_fill(0, self._ends[self._ends < len(logits)], -torch.inf)
        return longer if bool(longer.max() > -torch.inf) else logits

    def _biased(self, logits: torch.Tensor) -> torch.Tensor:
        bias = {i: value for i, value in self._params.logit_bias.items() if 0 <= i < len(logits)}
        if not bias:
            return logits
        return logits.index_add(0, torch.tensor(list(bias)), torch.tensor([float(b) for b in bias.values()]))

    def _penalised(self, logits: torch.Tensor) -> torch.Tensor:
        """Penalise repetition of prompt and answer (Hugging Face), frequency and presence (OpenAI)."""
        params, penalty = self._params, self._draw.repetition_penalty
        if penalty != 1.0:
            if self._seen is None:
                self._seen = torch.zeros(len(logits), dtype=torch.bool)
                self._seen[torch.from_numpy(self._prompt.astype("int64"))] = True
            weaker = torch.where(logits > 0, logits / penalty, logits * penalty)
            logits = torch.where(self._seen, weaker, logits)
        if self._counts and (params.presence_penalty or params.frequency_penalty):
            counts = torch.tensor(list(self._counts.values()), dtype=torch.float32)
            penalties = -(counts * params.frequency_penalty + params.presence_penalty)
            logits = logits.index_add(0, torch.tensor(list(self._counts)), penalties)
        return logits


def top_logprobs(logits: torch.Tensor, token_id: int, k: int) -> tuple[float, list[tuple[int, float]]]:
    """Return a token's log-probability, and those of the k likeliest tokens. Shapes: logits (V,) float32."""
    logprobs = logits.cpu().log_softmax(dim=-1)
    values, indices = logprobs.topk(min(k, len(logprobs))) if k else (logprobs[:0], logprobs[:0].long())
    likeliest = list(zip(indices.tolist(), values.tolist(), strict=True))
    return float(logprobs[token_id]), likeliest
