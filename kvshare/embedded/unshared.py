"""
Models that are served without sharing: those with recurrent layers or with attention that is not supported.

The state of a recurrent layer has no rows of single tokens, so nothing can be copied into it. Such a model
computes whole prompts, with the cache that transformers makes for it.
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
from kvshare.embedded.decoder import DecoderModel, relative_error
from kvshare.errors import ModelError
from kvshare.kv.layout import KVLayout
from kvshare.sharing.plan import NoPlan, Plan

log = logging.getLogger(__name__)

_CACHES = ("past_key_values", "cache_params", "state")  # the names that models use for their cache
_CONTINUED = 4  # tokens of the verification that are computed one by one


class OwnCache:
    """A sequence in the model's own cache, which is empty until the first tokens are computed."""

    def __init__(self) -> None:
        self.arguments: dict[str, Any] = {}  # the cache, by the name of the model's argument for it

    def fork(self, num_tokens: int) -> OwnCache:
        other = OwnCache()
        other.arguments = copy.deepcopy(self.arguments)
        return other


class UnsharedModel(DecoderModel[OwnCache]):
    """A decoder model that answers without sharing. `unsupported_reason` says why."""

    can_share = False

    def __init__(
        self, network: PreTrainedModel, *, name: str, why: str, max_model_len: int | None = None
    ) -> None:
        """Raises ModelError, also if the model's own cache changes its logits."""
        super().__init__(network, name=name, max_model_len=max_model_len)
        self._why = why
        parameter = next(network.parameters())
        self.layout = KVLayout((), parameter.dtype, parameter.device)
        self._parameters = inspect.signature(network.forward).parameters
        self._verify_cache()
        log.warning("%s is served without sharing: %s", name, why)

    @property
    def unsupported_reason(self) -> str:
        return self._why

    def new_sequence(self, capacity: int) -> OwnCache:
        return OwnCache()

    def prefill(
        self, prompt: TokenIds, plan: Plan | NoPlan, kv: OwnCache, *, num_computed: int = 0
    ) -> WholePrefill:
        assert isinstance(plan, NoPlan)
        assert not num_computed, "nothing is read from a disk, so nothing is computed meanwhile"
        return WholePrefill(self, prompt, plan, kv)

    def next_logits(self, kv: OwnCache, position: int, token_id: int) -> torch.Tensor:
        return self.append(kv, [token_id], position)[-1]

    @torch.inference_mode()
    def append(self, kv: OwnCache, tokens: Sequence[int], position: int) -> torch.Tensor:
        """Compute tokens at the end of a sequence. Returns the logits after the last one, (1, V) float32."""
        device, options = self.layout.device, dict[str, Any]()
        if "position_ids" in self._parameters:
            places = torch.arange(position, position + len(tokens), device=device)
            options["position_ids"] = places.unsqueeze(0)
        if "logits_to_keep" in self._parameters:
            options["logits_to_keep"] = 1
        output = self.network(
            input_ids=torch.tensor([list(tokens)], device=device), use_cache=True, **kv.arguments, **options
        )
        kv.arguments = {name: value for name in _CACHES if (value := output.get(name)) is not None}
        logits: torch.Tensor = output.logits[0]
        return logits[-1:].float()

    def _verify_cache(self) -> None:
        """
        Compare the logits of tokens that are computed one by one with those of whole prompts.

        Continuations by several tokens are not compared: several models lose their state there, so no prompt
        is computed in parts.
        """
        tokens: list[int] = self.probe_tokens().tolist()
        first = max(1, len(tokens) - _CONTINUED)
        kv = OwnCache()
        try:
            logits = [self.append(kv, tokens[:first], 0)]
            logits += [self.append(kv, [tokens[at]], at) for at in range(first, len(tokens))]
            expected = [self.append(OwnCache(), tokens[:end], 0) for end in range(first, len(tokens) + 1)]
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as exc:
            raise ModelError(f"{self.name} cannot compute: {type(exc).__name__}: {exc}") from exc
        error = relative_error(torch.cat(logits), torch.cat(expected))
        if not (kv.arguments and error <= self.tolerance):
            raise ModelError(
                f"{self.name}: logits with and without its own cache differ by {error:.2g} of the largest, "
                f"expected at most {self.tolerance:.2g}"
            )


class WholePrefill:
    """Computes a whole prompt in one pass, as transformers does."""

    def __init__(self, model: UnsharedModel, prompt: TokenIds, plan: NoPlan, kv: OwnCache) -> None:
        self.plan = plan
        self._model, self._prompt, self._kv = model, prompt, kv

    def advance(self, *, max_queries: int) -> tuple[int, torch.Tensor | None]:
        """Compute the whole prompt: there is one pass only, as not every model can continue from a state."""
        tokens: list[int] = self._prompt.tolist()
        return len(tokens), self._model.append(self._kv, tokens, 0)[-1]
