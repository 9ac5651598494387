"""
A Hugging Face decoder model: verified when it is loaded, and called with partial attention.

The model runs unmodified; `registered_attention` connects it to KVShare.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from delta_tree import Span, TokenIds, token_ids
from kvshare.embedded.decoder import DecoderModel, relative_error
from kvshare.embedded.prefill import Prefill
from kvshare.embedded.registered_attention import ATTENTION, SlotCache
from kvshare.embedded.stored_model import head_dim_of
from kvshare.errors import ModelError, UnshareableError
from kvshare.kv.attention import PartialPass
from kvshare.kv.layout import KVLayout
from kvshare.kv.movement import Observed, Verification, find_movement, why_not_movable
from kvshare.kv.parameters import frequency_tables, model_fingerprint
from kvshare.kv.sequence import SequenceKV
from kvshare.sharing.plan import NoPlan, Plan

log = logging.getLogger(__name__)

_KINDS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
_SHIFTS = (37, 133)  # tokens by which the probe prompt is moved to find the movement of rows
_MOST_ROUNDING = 0.5  # relative error of logits that two attentions of one model may have in bfloat16
_SHORT_REACH = 5  # tokens of windows and chunks in the verification: shorter than its prompt


class EmbeddedModel(DecoderModel[SequenceKV]):
    """
    A decoder model whose KV is shared.

    `layout` has the verified movements of its rows. If one is not known, only text at the same position is
    shared, and `unsupported_reason` says why. `forms`: how each layer attends.
    """

    can_share = True

    def __init__(self, model: PreTrainedModel, *, name: str, max_model_len: int | None = None) -> None:
        """Raises UnshareableError for a model that does not give the same logits with partial attention."""
        super().__init__(model, name=name, max_model_len=max_model_len)
        kinds = getattr(model.config, "layer_types", None) or ()  # not every configuration lists them
        if foreign := set(kinds) - _KINDS:
            raise UnshareableError(
                f"{name} has layers of kind {', '.join(sorted(foreign))}, which have no KV of single tokens"
            )
        parameter = next(model.parameters())
        try:
            with _short_reach(model):
                expected, shapes = self._unmodified()
                self.layout = KVLayout.of_shapes(shapes, dtype=parameter.dtype, device=parameter.device)
                self._verify_attention(expected)
            self.verifications = self._verify_movements()
        except torch.OutOfMemoryError as exc:
            raise ModelError(f"{name} does not fit into memory: {exc}") from exc
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as exc:
            problem = f"{type(exc).__name__}: {exc}"
            raise UnshareableError(
                f"{name} does not work with the cache and attention of KVShare ({problem})"
            ) from exc
        self.layout = self.layout.moving([(k.movement, v.movement) for k, v in self.verifications]).seeing(
            [self.forms[layer].reach for layer in range(self.layout.num_layers)]
        )
        if self.unsupported_reason:
            log.warning("%s: only text at the same position is shared: %s", name, self.unsupported_reason)

    @property
    def fingerprint(self) -> str:
        config = self.network.config
        return model_fingerprint(
            self.network.named_parameters(), num_layers=self.layout.num_layers, head_dim=head_dim_of(config)
        )

    @property
    def unsupported_reason(self) -> str:
        """Return the reason why rows of some layer cannot be moved; empty if all can."""
        problem = why_not_movable(self.verifications)
        return (frequency_tables(self.network)[1] or problem) if problem else ""

    @property
    def can_listen(self) -> bool:
        # Repairs are chosen by changes of values, so all layers must have values, of the same shape as keys.
        k, v = (self.layout.planes[number] for number in (0, -1))
        return len(self.layout.planes) == 2 and (k.num_heads, k.dim) == (v.num_heads, v.dim)

    def new_sequence(self, capacity: int) -> SequenceKV:
        return SequenceKV(self.layout, capacity)

    def prefill(
        self, prompt: TokenIds, plan: Plan | NoPlan, kv: SequenceKV, *, num_computed: int = 0
    ) -> Prefill:
        return Prefill(self.compute, prompt, plan, kv, num_computed=num_computed)

    def next_logits(self, kv: SequenceKV, position: int, token_id: int) -> torch.Tensor:
        kv.reserve(position + 1)
        current = PartialPass(kv, (Span(position, position + 1),))
        return self.compute(current, token_ids([token_id]))

    @torch.inference_mode()
    def compute(self, current: PartialPass, token_ids: TokenIds) -> torch.Tensor:
        """
        Compute the KV of the positions of a pass in place, and the logits after its last one.

        Shapes:  token_ids (N,) int32, the tokens at `current.positions` -> logits (V,), float32
        """
        return self.logits(current, token_ids, keep=1)[0]

    @torch.inference_mode()
    def logits(
        self, current: PartialPass, token_ids: TokenIds, *, keep: int, moved_by: int = 0
    ) -> torch.Tensor:
        """
        Do what `compute` does, but return the logits after the last `keep` positions: (keep, V), float32.

        `moved_by` is added to the position ids that the model gets; slots stay as they are.
        """
        device = self.layout.device
        output = self.network(
            input_ids=torch.from_numpy(token_ids.astype(np.int64)).to(device).unsqueeze(0),
            position_ids=(current.positions + moved_by).unsqueeze(0),
            past_key_values=SlotCache(current),
            use_cache=True,
            logits_to_keep=keep,
            partial_pass=current,
        )
        logits: torch.Tensor = output.logits[0]
        return logits.float()

    def _unmodified(
        self, attention: str = "eager"
    ) -> tuple[torch.Tensor, list[tuple[tuple[int, int], tuple[int, int]]]]:
        """Return logits (N, V) with an attention of the model's own, and the shapes of each layer's rows."""
        tokens, cache = self.probe_tokens(), DynamicCache()
        self.network.set_attn_implementation(attention)
        ids = torch.from_numpy(tokens.astype(np.int64)).to(next(self.network.parameters()).device)
        with torch.inference_mode():
            output = self.network(input_ids=ids.unsqueeze(0), past_key_values=cache, use_cache=True)
        self.network.set_attn_implementation(ATTENTION)
        layers: Sequence[Any] = cache.layers  # `DynamicLayer`s; transformers types them as any kind of layer
        stored = {number: layer for number, layer in enumerate(layers) if layer.is_initialized}
        if missing := set(range(self.network.config.num_hidden_layers)) - set(stored):
            raise UnshareableError(f"{self.name}: layer {min(missing)} has no keys and values of its own")
        shapes = [(_rows(layer.keys), _rows(layer.values)) for layer in stored.values()]
        return output.logits[0].float(), shapes

    def _verify_attention(self, expected: torch.Tensor) -> None:
        """
        Compute the same tokens with partial attention, and compare the logits. Windows and chunks are short
        meanwhile.

        Raises:  UnshareableError if they differ: our attention does not support all that the model needs
        """
        tokens = self.probe_tokens()
        current = PartialPass(self.new_sequence(len(tokens)), (Span(0, len(tokens)),))
        logits = self.logits(current, tokens, keep=len(tokens))
        if missing := set(range(self.layout.num_layers)) - set(current.forms):
            raise UnshareableError(f"{self.name}: layer {min(missing)} does not use the registered attention")
        error = relative_error(logits, expected)
        if (
            self.tolerance < error <= _MOST_ROUNDING
            and next(self.network.parameters()).dtype != torch.float32
        ):
            error = min(error, self._error_of_fused(logits))
        self.attention_error = error
        if not error <= self.tolerance:
            raise UnshareableError(
                f"{self.name}: logits differ from those of its own attention by {error:.2g} of the largest, "
                f"expected at most {self.tolerance:.2g}; its attention is not supported"
            )

    def _error_of_fused(self, logits: torch.Tensor) -> float:
        """
        Return the error of these logits relative to the model with its fused attention (SDPA), which keeps
        sums in float32 as ours does. In bfloat16 the eager one rounds scores, which large biases of keys
        amplify: for Qwen2.5-Coder-1.5B it differs from the fused one by .19, and ours does not.
        """
        try:
            expected, _ = self._unmodified("sdpa")
        except (ImportError, ValueError):  # the model has none
            self.network.set_attn_implementation(ATTENTION)
            return float("inf")
        return relative_error(logits, expected)

    def _verify_movements(self) -> list[tuple[Verification, Verification]]:
        """
        Compute the same tokens at other positions, and find how rows move there, layer by layer.

        Attention depends on relative positions only, so hidden states are the same and every layer can be
        compared.
        """
        tokens = self.probe_tokens()
        room = self.max_model_len - len(tokens)
        near = self._computed_at(tokens, 0)
        far = {shift: self._computed_at(tokens, shift) for shift in sorted({min(s, room) for s in _SHIFTS})}
        tables, _ = frequency_tables(self.network)

        def found(name: str, layer: int) -> Verification:
            plane, row = self.layout.places[name, layer]
            here = near.planes[plane][row]
            observed = [Observed(here, kv.planes[plane][row], shift) for shift, kv in far.items()]
            return find_movement(tables, observed, tolerance=self.tolerance)

        return [(found("k", layer), found("v", layer)) for layer in range(self.layout.num_layers)]

    def _computed_at(self, tokens: TokenIds, shift: int) -> SequenceKV:
        """Compute the KV of a prompt that begins at position `shift`."""
        kv = self.new_sequence(len(tokens))
        current = PartialPass(kv, (Span(0, len(tokens)),))
        self.logits(current, tokens, keep=1, moved_by=shift)
        self.forms = current.forms
        return kv


def _rows(stored: torch.Tensor) -> tuple[int, int]:
    """(H, D) of the rows in a cache of transformers, (1, H, T, D)."""
    return stored.shape[1], stored.shape[3]


@contextmanager
def _short_reach(model: PreTrainedModel) -> Iterator[None]:
    """Set windows and chunks to a few tokens inside the context, so that the probe prompt is longer."""
    configs = {id(each.config): each.config for each in model.modules() if hasattr(each, "config")}
    windows = [
        (config, name, size)
        for config in configs.values()
        for name in ("sliding_window", "attention_chunk_size")
        if isinstance(size := getattr(config, name, None), int) and size > _SHORT_REACH
    ]
    for config, name, _ in windows:
        setattr(config, name, _SHORT_REACH)
    try:
        yield
    finally:
        for config, name, size in windows:
            setattr(config, name, size)
