"""
A Hugging Face decoder model, loaded, checked and called for partial attention.

The model runs unmodified. Two hooks that transformers offers carry KVShare in: a cache object whose `update`
writes into the slots of a sequence, and a registered attention function that attends run by run.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, Cache, PreTrainedModel
from transformers.utils import logging as transformers_logging

from delta_tree import Span, TokenIds, token_ids
from kvshare.engines.embedded.rotary import find_rotation, head_dim_of, rotary_module
from kvshare.errors import ModelError, UnsupportedGeometryError
from kvshare.kv.attention import PartialPass
from kvshare.kv.fingerprint import model_fingerprint
from kvshare.kv.rotation import Rotation
from kvshare.kv.segment import KVGeometry
from kvshare.kv.sequence import SequenceKV

log = logging.getLogger(__name__)

_ATTENTION = "kvshare_partial"
# What some models ask of their attention, and ours does not do. A sliding window is not among them: it caps
# the context instead.
_CHANGES_ATTENTION = ("softcap", "s_aux", "position_bias", "head_mask")


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


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    partial_pass: PartialPass,
    **extras: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature; the mask is ignored because the pass knows its runs."""
    if wanted := [name for name in _CHANGES_ATTENTION if extras.get(name) is not None]:
        raise ModelError(f"attention with {', '.join(wanted)} is not handled")
    layer = int(module.layer_idx)  # type: ignore[arg-type]  # an int, says transformers
    output = partial_pass.attend(layer, query, key, value, scaling=scaling)
    return output.transpose(1, 2).contiguous(), None  # (1, N, H_q, D)


AttentionInterface.register(_ATTENTION, _attend)


class EmbeddedModel:
    """
    One decoder model on one device.

    `rotation` is None where moving keys is not known to be exact; then only equal prefixes are shared.
    """

    def __init__(self, model: PreTrainedModel, *, name: str, max_model_len: int | None = None) -> None:
        config = model.config
        if getattr(config, "is_encoder_decoder", False):
            raise ModelError(f"{name} is an encoder-decoder model; expected a decoder")
        self.name = name
        self._model: PreTrainedModel = model.train(False)
        self.vocab_size: int = config.vocab_size
        self.max_model_len = _context_length(config, max_model_len)
        parameter = next(model.parameters())
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.geometry = KVGeometry(
            num_layers=config.num_hidden_layers,
            num_kv_heads=heads,
            head_dim=head_dim_of(config),
            dtype=parameter.dtype,
            device=parameter.device,
        )
        self._prove_attention()
        self.rotation: Rotation | None = None
        self.rotation_refusal = ""
        try:
            rotation = find_rotation(model, head_dim=self.geometry.head_dim)
            self._prove_rotation(rotation)
            self.rotation = rotation
        except UnsupportedGeometryError as exc:
            self.rotation_refusal = str(exc)
            log.warning("%s: only equal prefixes are shared: %s", name, exc)

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
        geometry = self.geometry
        return model_fingerprint(
            self._model.named_parameters(), num_layers=geometry.num_layers, head_dim=geometry.head_dim
        )

    @property
    def rope_digest(self) -> str:
        """Digest of the rotary frequencies and of their scaling."""
        module = rotary_module(self._model)
        frequencies = getattr(module, "inv_freq", torch.empty(0)).detach().float().cpu().contiguous()
        scaling = str(getattr(module, "attention_scaling", 1.0))
        return hashlib.sha256(frequencies.numpy().tobytes() + scaling.encode()).hexdigest()

    def eos_token_ids(self, tokenizer_eos: int | None) -> frozenset[int]:
        """Tokens that end an answer: the generation config's, and the tokenizer's."""
        configured = getattr(self._model.generation_config, "eos_token_id", None)
        ids = [configured] if isinstance(configured, int) else list(configured or [])
        return frozenset(ids if tokenizer_eos is None else [*ids, tokenizer_eos])

    def new_sequence(self, capacity: int) -> SequenceKV:
        return SequenceKV(self.geometry, capacity)

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
        device = self.geometry.device
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

    def _prove_attention(self) -> None:
        """
        Run a few tokens through the model's own eager attention and through ours.

        Raises:  ModelError where they differ: such a model asks more of its attention than ours does
        """
        tokens = self._probe_tokens()
        self._model.set_attn_implementation("eager")
        ids = torch.from_numpy(tokens.astype(np.int64)).to(self.geometry.device)
        with torch.inference_mode():
            expected = self._model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0].float()
        self._model.set_attn_implementation(_ATTENTION)
        current = PartialPass(self.new_sequence(len(tokens)), (Span(0, len(tokens)),))
        found = self.logits(current, tokens, keep=len(tokens))
        if not (error := _relative_error(found, expected)) <= self._tolerance:
            raise ModelError(
                f"{self.name}: logits differ by {error:.2g} of the largest from the model's own attention, "
                f"expected at most {self._tolerance:.2g}; its attention is not handled"
            )

    def _prove_rotation(self, rotation: Rotation) -> None:
        """
        Compute the same tokens twice, the second time further on, and move the first keys there.

        Attention is relative, so hidden states are the same and every layer can be compared. Catches
        interleaved, multi-axis and layer-dependent geometries by what they do, not by name.
        """
        tokens = self._probe_tokens()
        shift = min(37, self.max_model_len - len(tokens))
        near, far = self.new_sequence(len(tokens)), self.new_sequence(len(tokens))
        span = Span(0, len(tokens))
        self.logits(PartialPass(near, (span,)), tokens, keep=1)
        self.logits(PartialPass(far, (span,)), tokens, keep=1, moved_by=shift)
        moved = rotation.moved(near.k, shift)
        for layer in range(self.geometry.num_layers):
            if not (error := _relative_error(moved[layer], far.k[layer])) <= self._tolerance:
                raise UnsupportedGeometryError(
                    f"keys of layer {layer} moved by {shift} positions differ from computed ones by "
                    f"{error:.2g} of the largest, expected at most {self._tolerance:.2g}"
                )

    def _probe_tokens(self) -> TokenIds:
        """A few different tokens, fewer where the context is shorter."""
        count = min(16, self.max_model_len)
        return token_ids((3 + 7 * np.arange(count)) % self.vocab_size)

    @property
    def _tolerance(self) -> float:
        """Relative to the largest value compared: rounding of a few layers, far below any real difference."""
        return 1e-3 if self.geometry.dtype == torch.float32 else 6e-2


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


def _context_length(config: Any, wanted: int | None) -> int:
    """
    The longest sequence this engine computes as the model means it.

    A sliding window is the full causal attention up to its length, so the window caps the context.
    """
    limits = [int(getattr(config, "max_position_embeddings", 0) or 0) or 2048]
    layer_types: Sequence[str] = getattr(config, "layer_types", None) or ()
    windowed = "sliding_attention" in layer_types or not layer_types
    if (window := getattr(config, "sliding_window", None)) and windowed:
        limits.append(int(window))
    foreign = set(layer_types) - {"full_attention", "sliding_attention"}
    if foreign:
        raise ModelError(f"layer types {sorted(foreign)} are not handled; expected full attention throughout")
    longest = min(limits)
    if wanted is not None and wanted > longest:
        raise ModelError(f"max_model_len {wanted} is more than the {longest} tokens this model can run")
    return wanted or longest
