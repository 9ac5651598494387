"""
A Hugging Face decoder model, loaded, checked and called for partial attention.

The model runs unmodified. Two hooks that transformers offers carry KVShare in: a cache object whose `update`
writes into the slots of a sequence, and a registered attention function that attends run by run.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    Cache,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from delta_tree import Span, TokenIds, token_ids
from kvshare.engines.embedded.rotary import head_dim_of
from kvshare.errors import ModelError
from kvshare.kv.attention import PartialPass
from kvshare.kv.fingerprint import model_fingerprint
from kvshare.kv.form import PLAIN, Form
from kvshare.kv.frequencies import frequency_tables, rope_digest
from kvshare.kv.layout import ALL_EARLIER, KVLayout, Reach
from kvshare.kv.movement import Movement, Observed, Proof, prove
from kvshare.kv.sequence import SequenceKV

log = logging.getLogger(__name__)

_ATTENTION = "kvshare_partial"
_CHANGES_ATTENTION = (
    "position_bias",
    "head_mask",
)  # what some models ask of their attention, and ours does not do
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
        raise ModelError(f"attention with {', '.join(wanted)} is not handled")
    layer = int(module.layer_idx)  # type: ignore[arg-type]  # an int, says transformers
    is_plain = attention_mask in (None, ALL_EARLIER) and softcap is None and s_aux is None
    form = PLAIN if is_plain else Form(attention_mask or ALL_EARLIER, softcap, s_aux)
    partial_pass.forms[layer] = form
    output = partial_pass.attend(layer, query, key, value, scaling=scaling, form=form)
    return output.transpose(1, 2).contiguous(), None  # (1, N, H_q, D)


AttentionInterface.register(_ATTENTION, _attend)
AttentionMaskInterface.register(_ATTENTION, _reach)


class EmbeddedModel:
    """
    One decoder model on one device.

    `layout` says how its rows move, as proved; where that is not known `refusal` says why, and only text at
    the same position is shared. `forms`: what each layer asks of its attention.
    """

    def __init__(self, model: PreTrainedModel, *, name: str, max_model_len: int | None = None) -> None:
        config = model.config
        if getattr(config, "is_encoder_decoder", False):
            raise ModelError(f"{name} is an encoder-decoder model; expected a decoder")
        if config.get_text_config() is not config:
            raise ModelError(f"{name} takes more than text ({config.model_type}); expected a model of text")
        self.name = name
        self._model: PreTrainedModel = model.train(False)
        self.vocab_size: int = config.vocab_size
        self.max_model_len = _context_length(config, max_model_len)
        parameter = next(model.parameters())
        try:
            with _short_reach(model):
                expected, shapes = self._as_it_is()
                self.layout = KVLayout.of_shapes(shapes, dtype=parameter.dtype, device=parameter.device)
                self._prove_attention(expected)
            self.proofs = self._prove_movements()
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as exc:
            problem = f"{type(exc).__name__}: {exc}"
            raise ModelError(f"{name} does not take cache and attention from outside ({problem})") from exc
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
        """
        Load a Hugging Face name or folder. `dtype` "auto" is what `chosen_dtype` says.

        Raises:  ModelError if it cannot be loaded or is not a decoder this engine can run
        """
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # ships no types
        where = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        try:
            config = AutoConfig.from_pretrained(path)
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                path,
                config=config,
                dtype=chosen_dtype(config.dtype, where) if dtype == "auto" else getattr(torch, dtype),
            )
            torch.nn.Module.to(model, where)
        except (OSError, ValueError, KeyError, RuntimeError) as exc:
            raise ModelError(f"model {str(path)!r} cannot be loaded: {exc}") from exc
        return cls(model, name=name, max_model_len=max_model_len)

    @property
    def network(self) -> PreTrainedModel:
        """The transformers model, in evaluation mode, with KVShare's attention."""
        return self._model

    @property
    def revision(self) -> str:
        """
        Digest of the configuration and of every weight: another checkpoint is another revision.

        The weights go through xxh3, which reads gigabytes in seconds; nobody forges checkpoints here.
        """
        digest = hashlib.sha256(self._model.config.to_json_string(use_diff=False).encode())
        for name, tensor in sorted(self._model.state_dict().items()):
            weights = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
            digest.update(name.encode())
            digest.update(xxhash.xxh3_128(weights).digest())
        return digest.hexdigest()

    @property
    def fingerprint(self) -> str:
        """What a calibration is found by; see `model_fingerprint`."""
        config = self._model.config
        return model_fingerprint(
            self._model.named_parameters(), num_layers=self.layout.num_layers, head_dim=head_dim_of(config)
        )

    @property
    def rope_digest(self) -> str:
        """Digest of the rotary frequencies, of their scaling and of how each layer's rows move."""
        return hashlib.sha256(f"{rope_digest(self._model)}{self.layout.digest}".encode()).hexdigest()

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
                    tables = frequency_tables(self._model)[1]
                    return (
                        tables
                        or f"{name} of layer {layer}: {proof.reason} (error {proof.error:.2g} of the largest)"
                    )
        return ""

    @property
    def can_listen(self) -> bool:
        """Whether what changed can be told from values: all layers keep some, as wide as keys."""
        k, v = (self.layout.planes[number] for number in (0, -1))
        return len(self.layout.planes) == 2 and (k.num_heads, k.dim) == (v.num_heads, v.dim)

    def eos_token_ids(self, tokenizer_eos: int | None) -> frozenset[int]:
        """Tokens that end an answer: the generation config's, and the tokenizer's."""
        configured = getattr(self._model.generation_config, "eos_token_id", None)
        ids = [configured] if isinstance(configured, int) else list(configured or [])
        return frozenset(ids if tokenizer_eos is None else [*ids, tokenizer_eos])

    def new_sequence(self, capacity: int) -> SequenceKV:
        return SequenceKV(self.layout, capacity)

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
        output = self._model(
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
        self._model.set_attn_implementation("eager")
        ids = torch.from_numpy(tokens.astype(np.int64)).to(next(self._model.parameters()).device)
        with torch.inference_mode():
            output = self._model(input_ids=ids.unsqueeze(0), past_key_values=cache, use_cache=True)
        self._model.set_attn_implementation(_ATTENTION)
        missing = set(range(self._model.config.num_hidden_layers)) - set(cache.shapes)
        if missing:
            raise ModelError(f"{self.name}: layer {min(missing)} keeps no keys and values of its own")
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
            raise ModelError(f"{self.name}: layer {min(missing)} does not take attention from outside")
        self.attention_error = error = _relative_error(found, expected)
        if not error <= self._tolerance:
            raise ModelError(
                f"{self.name}: logits differ by {error:.2g} of the largest from the model's own attention, "
                f"expected at most {self._tolerance:.2g}; its attention is not handled"
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
        tables, _ = frequency_tables(self._model)

        def proof(name: str, layer: int) -> Proof:
            plane, row = self.layout.places[name, layer]
            here = near.planes[plane][row]
            observed = [Observed(here, kv.planes[plane][row], shift) for shift, kv in far.items()]
            return prove(tables, observed, tolerance=self._tolerance)

        return [(proof("k", layer), proof("v", layer)) for layer in range(self.layout.num_layers)]

    def _computed_at(self, tokens: TokenIds, shift: int) -> SequenceKV:
        """A prompt's KV as if it began at another position."""
        kv = self.new_sequence(len(tokens))
        current = PartialPass(kv, (Span(0, len(tokens)),))
        self.logits(current, tokens, keep=1, moved_by=shift)
        self.forms = current.forms
        return kv

    def _probe_tokens(self) -> TokenIds:
        """A few different tokens, fewer where the context is shorter."""
        count = min(16, self.max_model_len)
        return token_ids((3 + 7 * np.arange(count)) % self.vocab_size)

    @property
    def _tolerance(self) -> float:
        """Relative to the largest value compared: rounding of a few layers, far below any real difference."""
        return 1e-3 if self.layout.dtype == torch.float32 else 6e-2


def chosen_dtype(saved: torch.dtype | None, device: str) -> torch.dtype:
    """
    The format that the weights were saved in, where `device` multiplies in it, else float32.

    A processor without instructions for bfloat16 converts every operand: slower than float32, and less exact.
    """
    if saved not in (torch.bfloat16, torch.float16):
        return torch.float32
    if device.startswith("cuda"):
        native = saved is torch.float16 or torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        able = torch.cpu.get_capabilities() if device == "cpu" else {}
        native = saved is torch.bfloat16 and bool(able.get("avx512_bf16") or able.get("amx_bf16"))
    return saved if native else torch.float32


def _relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, in units of the largest value."""
    difference = (found.float() - expected.float()).abs().max()
    return float(difference / expected.float().abs().max().clamp(min=1e-6))


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


def _context_length(config: Any, wanted: int | None) -> int:
    """The longest sequence this engine computes as the model means it."""
    limits = [int(getattr(config, "max_position_embeddings", 0) or 0) or 2048]
    if getattr(config, "attn_temperature_tuning", False):
        # Llama 4 scales queries from here on, by a position that it takes from the cache's length.
        limits.append(int(config.floor_scale) - 1)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":  # behind this length keys are turned by another table
        original = rope.get("original_max_position_embeddings")
        limits.append(int(original or getattr(config, "original_max_position_embeddings", None) or limits[0]))
    layer_types: Sequence[str] = getattr(config, "layer_types", None) or ()
    if foreign := set(layer_types) - {"full_attention", "sliding_attention", "chunked_attention"}:
        raise ModelError(f"layer types {sorted(foreign)} are not handled; expected attention in all layers")
    longest = min(limits)
    if wanted is not None and wanted > longest:
        raise ModelError(f"max_model_len {wanted} is more than the {longest} tokens this model can run")
    return wanted or longest
