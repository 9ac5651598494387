"""
Models of which nothing can be shared, served all the same: layers with a state, attention of their own kind.

A layer with a state has no rows that belong to single tokens, so nothing can be laid between others. Such a
model is computed whole, in the cache that transformers makes for it.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from delta_tree import TokenIds
from kvshare.engines.embedded.decoder import DecoderModel, relative_error
from kvshare.errors import ModelError
from kvshare.kv.layout import KVLayout
from kvshare.sharing.plan import NoPlan, Plan

log = logging.getLogger(__name__)

_CACHES = ("past_key_values", "cache_params", "state")  # what models call theirs
_CONTINUED = 4  # tokens of the proof that are computed one by one


class OwnCache:
    """A sequence in the model's own cache; nothing before its first tokens are computed."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}  # by the name the model knows it by

    def fork(self, num_tokens: int) -> OwnCache:
        other = OwnCache()
        other.kept = copy.deepcopy(self.kept)
        return other


class UnsharedModel(DecoderModel[OwnCache]):
    """A decoder model that answers and shares nothing. `refusal` says why."""

    can_share = False

    def __init__(
        self, network: PreTrainedModel, *, name: str, why: str, max_model_len: int | None = None
    ) -> None:
        """Raises ModelError also where the model's own cache does not give what it computes without."""
        super().__init__(network, name=name, max_model_len=max_model_len)
        self._why = why
        parameter = next(network.parameters())
        self.layout = KVLayout((), parameter.dtype, parameter.device)
        self._takes_positions = "position_ids" in _parameters(network)
        self._prove_cache()
        log.warning("%s is served, and nothing of it is shared: %s", name, why)

    @property
    def refusal(self) -> str:
        return self._why

    @property
    def fingerprint(self) -> str:
        return ""

    @property
    def can_listen(self) -> bool:
        return False

    def new_sequence(self, capacity: int) -> OwnCache:
        return OwnCache()

    def prefill(self, prompt: TokenIds, plan: Plan | NoPlan, kv: OwnCache) -> WholePrefill:
        assert isinstance(plan, NoPlan)
        return WholePrefill(self, prompt, plan, kv)

    def next_logits(self, kv: OwnCache, position: int, token_id: int) -> torch.Tensor:
        return self.append(kv, [token_id], position)[-1]

    @torch.inference_mode()
    def append(self, kv: OwnCache, tokens: Sequence[int], position: int) -> torch.Tensor:
        """Compute tokens at the end of a sequence. Returns the logits after its last one, (1, V) float32."""
        return self._logits(kv, tokens, position, logits_to_keep=1)

    def _logits(self, kv: OwnCache, tokens: Sequence[int], position: int, **options: Any) -> torch.Tensor:
        device = self.layout.device
        if self._takes_positions:
            places = torch.arange(position, position + len(tokens), device=device)
            options["position_ids"] = places.unsqueeze(0)
        if "logits_to_keep" not in _parameters(self.network):
            options.pop("logits_to_keep", None)
        output = self.network(
            input_ids=torch.tensor([list(tokens)], device=device), use_cache=True, **kv.kept, **options
        )
        kv.kept = {name: value for name in _CACHES if (value := output.get(name)) is not None}
        logits: torch.Tensor = output.logits[0]
        return logits[-1:].float()

    def _prove_cache(self) -> None:
        """
        The last tokens of a prompt one by one, against the whole in one go.

        Longer continuations are not tried, for no prompt is computed in parts: several models forget their
        state then.
        """
        tokens = self.probe_tokens()
        first = max(1, len(tokens) - _CONTINUED)
        kv = OwnCache()
        try:
            with torch.inference_mode():
                found = [self._logits(kv, tokens[:first], 0)]
                found += [self._logits(kv, [tokens[at]], at) for at in range(first, len(tokens))]
                expected = [
                    self._logits(OwnCache(), tokens[:end], 0) for end in range(first, len(tokens) + 1)
                ]
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as exc:
            raise ModelError(f"{self.name} cannot be run: {type(exc).__name__}: {exc}") from exc
        error = relative_error(torch.cat(found), torch.cat(expected))
        if not (kv.kept and error <= self.tolerance):
            raise ModelError(
                f"{self.name}: with its own cache logits differ by {error:.2g} of the largest from those "
                f"without, expected at most {self.tolerance:.2g}"
            )


class WholePrefill:
    """Computes a prompt in one pass, as transformers does."""

    def __init__(self, model: UnsharedModel, prompt: TokenIds, plan: NoPlan, kv: OwnCache) -> None:
        self.plan = plan
        self._model, self._prompt, self._kv = model, prompt, kv

    def advance(self, *, max_queries: int) -> tuple[int, torch.Tensor | None]:
        """See `RunningPrefill`. The pass is never cut: not every model goes on from a state."""
        tokens: list[int] = self._prompt.tolist()
        return len(tokens), self._model.append(self._kv, tokens, 0)[-1]


def _parameters(network: PreTrainedModel) -> frozenset[str]:
    return frozenset(inspect.signature(network.forward).parameters)
