"""
A Hugging Face decoder model, loaded, checked and called for partial attention.

The model runs unmodified. Two hooks that transformers offers carry KVShare in: a cache object whose `update`
writes into the slots of a sequence, and a registered attention function that attends run by run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel

from delta_tree import Span, TokenIds, token_ids
from kvshare.engines.embedded.decoder import DecoderModel, layer_kinds, load_network, relative_error
from kvshare.engines.embedded.prefill import Prefill
from kvshare.engines.embedded.rotary import head_dim_of
from kvshare.errors import ModelError, UnshareableError
from kvshare.kv.attention import PartialPass
from kvshare.kv.fingerprint import model_fingerprint
from kvshare.kv.form import PLAIN, Form
from kvshare.kv.frequencies import frequency_tables
from kvshare.kv.layout import ALL_EARLIER, KVLayout, Reach
from kvshare.kv.movement import Movement, Observed, Proof, prove
from kvshare.kv.sequence import SequenceKV
from kvshare.sharing.plan import NoPlan, Plan

log = logging.getLogger(__name__)

_ATTENTION = "kvshare_partial"
_CHANGES_ATTENTION = ("position_bias", "head_mask")  # what some models ask of theirs, and ours does not do
_KINDS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
_SHIFTS = (37, 133)  # by which rows are moved to prove how
_SHORT_REACH = 5  # of windows and chunks in the proof: shorter than its prompt


class _SlotCache(Cache):
    """What a model believes to be its cache: `update` writes the new rows and returns all visible KV."""

    def __init__(self, current: PartialPass) -> None:
        super().__init__(layers=[])
        self.current = current

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.current.store(layer_idx, key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.current.num_visible

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.current.num_visible, 0


class _ShapesCache(Cache):
    """Writes down what each layer wants to keep of a token, and keeps nothing."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.shapes: dict[int, tuple[tuple[int, int], tuple[int, int]]] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = ((rows.shape[1], rows.shape[3]) for rows in (key_states, value_states))
        self.shapes[layer_idx] = first, second
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


def _reach(*, mask_function: Callable[..., Any], local_size: int | None = None, **_: Any) -> Reach:
    """
    transformers asks here for the mask of each kind of layer, and hands it to these layers' attention.

    Whether the model means what we read is proved by its logits.
    """
    if local_size is None:
        return ALL_EARLIER
    # The token at `local_size` sees the one at 1 through a window, and not across the border of a chunk.
    sees = mask_function(0, 0, torch.tensor(local_size), torch.tensor(1))
    return Reach(local_size, is_chunked=not bool(sees))


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Reach | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    partial_pass: PartialPass,
    **extras: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature; the pass knows its runs, the mask says how far they see."""
    if wanted := [name for name in _CHANGES_ATTENTION if extras.get(name) is not None]:
        raise UnshareableError(f"attention with {', '.join(wanted)} is not handled")
    layer = int(module.layer_idx)  # type: ignore[arg-type]  # an int, says transformers
    is_plain = attention_mask in (None, ALL_EARLIER) and softcap is None and s_aux is None
    form = PLAIN if is_plain else Form(attention_mask or ALL_EARLIER, softcap, s_aux)
    partial_pass.forms[layer] = form
    output = partial_pass.attend(layer, query, key, value, scaling=scaling, form=form)
    return output.transpose(1, 2).contiguous(), None  # (1, N, H_q, D)


AttentionInterface.register(_ATTENTION, _attend)
AttentionMaskInterface.register(_ATTENTION, _reach)


class EmbeddedModel(DecoderModel[SequenceKV]):
    """
    A decoder model whose KV is shared.

    `layout` says how its rows move, as proved; where that is not known `refusal` says why, and only text at
    the same position is shared. `forms`: what each layer asks of its attention.
    """

    can_share = True

    def __init__(self, model: PreTrainedModel, *, name: str, max_model_len: int | None = None) -> None:
        """Raises UnshareableError for a model that this engine can run, but not with our attention."""
        super().__init__(model, name=name, max_model_len=max_model_len)
        if foreign := set(layer_kinds(model.config)) - _KINDS:
            raise UnshareableError(
                f"{name} has layers of kind {', '.join(sorted(foreign))}, which keep a state"
            )
        parameter = next(model.parameters())
        try:
            with _short_reach(model):
                expected, shapes = self._as_it_is()
                self.layout = KVLayout.of_shapes(shapes, dtype=parameter.dtype, device=parameter.device)
                self._prove_attention(expected)
            self.proofs = self._prove_movements()
        except torch.OutOfMemoryError as exc:
            raise ModelError(f"{name} does not fit into memory: {exc}") from exc
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as exc:
            problem = f"{type(exc).__name__}: {exc}"
            raise UnshareableError(
                f"{name} does not take cache and attention from outside ({problem})"
            ) from exc
        self.layout = self.layout.moving([(k.movement, v.movement) for k, v in self.proofs]).seeing(
            [self.forms[layer].reach for layer in range(self.layout.num_layers)]
        )
        if self.refusal:
            log.warning("%s: only text at the same position is shared: %s", name, self.refusal)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        name: str,
        device: str = "auto",
        dtype: str = "float32",
        max_model_len: int | None = None,
    ) -> EmbeddedModel:
        """Of a Hugging Face name or folder, see `load_network`. Raises ModelError."""
        return cls(load_network(path, device=device, dtype=dtype), name=name, max_model_len=max_model_len)

    @property
    def fingerprint(self) -> str:
        config = self.network.config
        return model_fingerprint(
            self.network.named_parameters(), num_layers=self.layout.num_layers, head_dim=head_dim_of(config)
        )

    @property
    def rotation(self) -> Movement | None:
        """The one rotation of all keys; None for any other model."""
        return self.layout.rotation

    @property
    def refusal(self) -> str:
        """Why rows of some layer cannot be moved; empty where all can."""
        for layer, proofs in enumerate(self.proofs):
            for name, proof in zip(("keys", "values"), proofs, strict=True):
                if proof.movement is None:
                    tables = frequency_tables(self.network)[1]
                    return (
                        tables
                        or f"{name} of layer {layer}: {proof.reason} (error {proof.error:.2g} of the largest)"
                    )
        return ""

    @property
    def can_listen(self) -> bool:
        # What changed is told from values: all layers keep some, as wide as keys.
        k, v = (self.layout.planes[number] for number in (0, -1))
        return len(self.layout.planes) == 2 and (k.num_heads, k.dim) == (v.num_heads, v.dim)

    def new_sequence(self, capacity: int) -> SequenceKV:
        return SequenceKV(self.layout, capacity)

    def prefill(self, prompt: TokenIds, plan: Plan | NoPlan, kv: SequenceKV) -> Prefill:
        return Prefill(self, prompt, plan, kv)

    def next_logits(self, kv: SequenceKV, position: int, token_id: int) -> torch.Tensor:
        kv.reserve(position + 1)
        current = PartialPass(kv, (Span(position, position + 1),))
        return self.compute(current, token_ids([token_id]))

    @torch.inference_mode()
    def compute(self, current: PartialPass, token_ids: TokenIds) -> torch.Tensor:
        """
        Compute the KV of the pass's positions in place, and the logits after its last one.

        Shapes:  token_ids (N,) int32, the tokens at `current.positions` -> logits (V,), float32
        """
        return self.logits(current, token_ids, keep=1)[0]

    @torch.inference_mode()
    def logits(
        self, current: PartialPass, token_ids: TokenIds, *, keep: int, moved_by: int = 0
    ) -> torch.Tensor:
        """
        Like `compute`, with the logits after the last `keep` positions: (keep, V), float32.

        `moved_by` makes the model believe that all positions are so much higher; slots stay as they are.
        """
        device = self.layout.device
        output = self.network(
            input_ids=torch.from_numpy(token_ids.astype(np.int64)).to(device).unsqueeze(0),
            position_ids=(current.positions + moved_by).unsqueeze(0),
            past_key_values=_SlotCache(current),
            use_cache=True,
            logits_to_keep=keep,
            partial_pass=current,
        )
        logits: torch.Tensor = output.logits[0]
        return logits.float()

    def _as_it_is(self) -> tuple[torch.Tensor, list[tuple[tuple[int, int], tuple[int, int]]]]:
        """Logits (N, V) of the model's own eager attention, and what each layer keeps of a token."""
        tokens, cache = self._probe_tokens(), _ShapesCache()
        self.network.set_attn_implementation("eager")
        ids = torch.from_numpy(tokens.astype(np.int64)).to(next(self.network.parameters()).device)
        with torch.inference_mode():
            output = self.network(input_ids=ids.unsqueeze(0), past_key_values=cache, use_cache=True)
        self.network.set_attn_implementation(_ATTENTION)
        missing = set(range(self.network.config.num_hidden_layers)) - set(cache.shapes)
        if missing:
            raise UnshareableError(f"{self.name}: layer {min(missing)} keeps no keys and values of its own")
        return output.logits[0].float(), [cache.shapes[layer] for layer in sorted(cache.shapes)]

    def _prove_attention(self, expected: torch.Tensor) -> None:
        """
        Run the same tokens through our attention, with windows and chunks so short that they matter.

        Raises:  ModelError where it differs: such a model asks more of its attention than ours does
        """
        tokens = self._probe_tokens()
        current = PartialPass(self.new_sequence(len(tokens)), (Span(0, len(tokens)),))
        found = self.logits(current, tokens, keep=len(tokens))
        if missing := set(range(self.layout.num_layers)) - set(current.forms):
            raise UnshareableError(f"{self.name}: layer {min(missing)} does not take attention from outside")
        self.attention_error = error = relative_error(found, expected)
        if not error <= self.tolerance:
            raise UnshareableError(
                f"{self.name}: logits differ by {error:.2g} of the largest from the model's own attention, "
                f"expected at most {self.tolerance:.2g}; its attention is not handled"
            )

    def _prove_movements(self) -> list[tuple[Proof, Proof]]:
        """
        Compute the same tokens again further on, and find how the first rows get there, layer by layer.

        Attention is relative, so hidden states are the same and every layer can be compared.
        """
        tokens = self._probe_tokens()
        room = self.max_model_len - len(tokens)
        near = self._computed_at(tokens, 0)
        far = {shift: self._computed_at(tokens, shift) for shift in sorted({min(s, room) for s in _SHIFTS})}
        tables, _ = frequency_tables(self.network)

        def proof(name: str, layer: int) -> Proof:
            plane, row = self.layout.places[name, layer]
            here = near.planes[plane][row]
            observed = [Observed(here, kv.planes[plane][row], shift) for shift, kv in far.items()]
            return prove(tables, observed, tolerance=self.tolerance)

        return [(proof("k", layer), proof("v", layer)) for layer in range(self.layout.num_layers)]

    def _computed_at(self, tokens: TokenIds, shift: int) -> SequenceKV:
        """A prompt's KV as if it began at another position."""
        kv = self.new_sequence(len(tokens))
        current = PartialPass(kv, (Span(0, len(tokens)),))
        self.logits(current, tokens, keep=1, moved_by=shift)
        self.forms = current.forms
        return kv

    def _probe_tokens(self) -> TokenIds:
        return token_ids(self.probe_tokens())


@contextmanager
def _short_reach(model: PreTrainedModel) -> Iterator[None]:
    """Windows and chunks of a few tokens, so that a short prompt is longer than they are."""
    configs = {id(each.config): each.config for each in model.modules() if hasattr(each, "config")}
    found = [
        (config, name, size)
        for config in configs.values()
        for name in ("sliding_window", "attention_chunk_size")
        if isinstance(size := getattr(config, name, None), int) and size > _SHORT_REACH
    ]
    for config, name, _ in found:
        setattr(config, name, _SHORT_REACH)
    try:
        yield
    finally:
        for config, name, size in found:
            setattr(config, name, size)
