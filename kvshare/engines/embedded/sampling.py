"""Choosing the next token from logits: OpenAI's parameters, on the CPU, one sequence at a time."""

from __future__ import annotations

from collections import Counter

import torch

from kvshare.engines.base import SamplingParams


class Sampler:
    """Samples one choice. The same seed gives the same tokens for the same logits."""

    def __init__(self, params: SamplingParams, choice: int) -> None:
        self._params = params
        self._counts: Counter[int] = Counter()
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed((params.seed + choice) % 2**63)

    def sample(self, logits: torch.Tensor) -> int:
        """
        The next token id.

        Shapes:  logits (V,) float32; not changed
        """
        logits = self._adjusted(logits.cpu())
        temperature = 1.0 if self._params.temperature is None else self._params.temperature
        token_id = int(logits.argmax()) if temperature < 1e-5 else self._draw(logits / temperature)
        self._counts[token_id] += 1
        return token_id

    def _adjusted(self, logits: torch.Tensor) -> torch.Tensor:
        """Penalties over generated tokens and biases, as OpenAI defines them."""
        params = self._params
        if not params.logit_bias and not (params.presence_penalty or params.frequency_penalty):
            return logits
        logits = logits.clone()
        for token_id, count in self._counts.items():
            logits[token_id] -= params.presence_penalty + count * params.frequency_penalty
        for token_id, bias in params.logit_bias.items():
            if 0 <= token_id < len(logits):
                logits[token_id] += bias
        return logits

    def _draw(self, logits: torch.Tensor) -> int:
        """Nucleus sampling: from the smallest set of tokens whose probability reaches top_p."""
        probabilities = logits.softmax(dim=-1)
        top_p = 1.0 if self._params.top_p is None else self._params.top_p
        if top_p < 1.0:
            ordered, indices = probabilities.sort(descending=True)
            before = ordered.cumsum(dim=-1) - ordered
            ordered[before >= top_p] = 0.0
            ordered[0] = max(float(ordered[0]), 1e-9)  # top_p = 0 still leaves the likeliest
            return int(indices[torch.multinomial(ordered, 1, generator=self._generator)])
        return int(torch.multinomial(probabilities, 1, generator=self._generator))


def top_logprobs(logits: torch.Tensor, token_id: int, k: int) -> tuple[float, list[tuple[int, float]]]:
    """The token's log-probability, and the k likeliest tokens with theirs. Shapes: logits (V,) float32."""
    logprobs = logits.cpu().log_softmax(dim=-1)
    values, indices = logprobs.topk(min(k, len(logprobs))) if k else (logprobs[:0], logprobs[:0].long())
    likeliest = list(zip(indices.tolist(), values.tolist(), strict=True))
    return float(logprobs[token_id]), likeliest
