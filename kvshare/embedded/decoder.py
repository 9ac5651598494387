"""The interface of a decoder model in the embedded engine, whether or not its KV can be shared."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import numpy as np
import torch
import xxhash
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from delta_tree import TokenIds, token_ids
from kvshare.embedded.sampling import DRAW_FIELDS
from kvshare.errors import ModelError
from kvshare.kv.layout import KVLayout
from kvshare.kv.parameters import rope_digest
from kvshare.sharing.plan import NoPlan, Plan


class RunningSequence(Protocol):
    """The state of a sequence that a model continues."""

    def fork(self, num_tokens: int) -> Self:
        """Return a copy of this sequence, which has `num_tokens` tokens, to continue it in another way."""


class RunningPrefill(Protocol):
    """A prompt that is being computed; see `prefill.Prefill`."""

    @property
    def plan(self) -> Plan | NoPlan:
        """Return the plan as it is carried out."""

    def advance(self, *, max_queries: int) -> tuple[int, torch.Tensor | None]:
        """Run one pass. Returns how many tokens it computed and, from the last pass, logits (V,)."""


SequenceT = TypeVar("SequenceT", bound=RunningSequence)


class DecoderModel(ABC, Generic[SequenceT]):
    """
    One decoder model on one device.

    `layout` describes the KV that can be shared; without sharing it has no planes. `sampling_defaults`:
    values of the model's generation config, by the names of the fields of `sampling.Draw`.
    """

    can_share: ClassVar[bool]
    layout: KVLayout

    def __init__(self, network: PreTrainedModel, *, name: str, max_model_len: int | None) -> None:
        """Raises ModelError if it is not a decoder of text, or `max_model_len` is longer than its context."""
        config = network.config
        if getattr(config, "is_encoder_decoder", False):
            raise ModelError(f"{name} is an encoder-decoder model; expected a decoder-only model")
        if config.get_text_config() is not config:
            raise ModelError(f"{name} takes more than text ({config.model_type}); expected a text-only model")
        self.name = name
        self.network: PreTrainedModel = network.train(False)
        self.vocab_size: int = config.vocab_size
        self.max_model_len = _context_length(config, max_model_len)
        self.sampling_defaults = _sampling_defaults(network)

    @property
    @abstractmethod
    def unsupported_reason(self) -> str:
        """Return the reason why not everything can be shared; empty if it can."""

    @property
    def fingerprint(self) -> str:
        """Identifies the calibration of the model, see `model_fingerprint`; empty if nothing is shared."""
        return ""

    @property
    def can_listen(self) -> bool:
        """Repairs can be chosen after a probe pass."""
        return False

    @abstractmethod
    def new_sequence(self, capacity: int) -> SequenceT: ...

    @abstractmethod
    def prefill(
        self, prompt: TokenIds, plan: Plan | NoPlan, kv: SequenceT, *, num_computed: int = 0
    ) -> RunningPrefill:
        """
        Prepare to compute the tokens of a prompt whose KV was not copied into `kv`. `num_computed`: `kv` has
        that of so many leading tokens.
        """

    @abstractmethod
    def next_logits(self, kv: SequenceT, position: int, token_id: int) -> torch.Tensor:
        """Compute one token at the end of a sequence. Returns the logits (V,) after it, float32."""

    @property
    def revision(self) -> str:
        """
        Digest of the configuration and of every weight: another checkpoint is another revision.

        Weights are hashed with xxh3, which reads gigabytes in seconds. It is not cryptographic; the operator
        chooses the checkpoint.
        """
        digest = hashlib.sha256(self.network.config.to_json_string(use_diff=False).encode())
        for name, tensor in sorted(self.network.state_dict().items()):
            weights = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
            digest.update(name.encode())
            digest.update(xxhash.xxh3_128(weights).digest())
        return digest.hexdigest()

    @property
    def rope_digest(self) -> str:
        """Digest of the rotary frequencies, their scaling, and the movements of each layer's rows."""
        return hashlib.sha256(f"{rope_digest(self.network)}{self.layout.digest}".encode()).hexdigest()

    def eos_token_ids(self, tokenizer_eos: int | None) -> frozenset[int]:
        """Tokens that end an answer: those of the generation config, and that of the tokenizer."""
        configured = getattr(self.network.generation_config, "eos_token_id", None)
        ids = [configured] if isinstance(configured, int) else list(configured or [])
        return frozenset(ids if tokenizer_eos is None else [*ids, tokenizer_eos])

    def probe_tokens(self) -> TokenIds:
        """Up to 16 different tokens to test the model with, fewer if its context is shorter."""
        return token_ids((3 + 7 * np.arange(min(16, self.max_model_len))) % self.vocab_size)

    @property
    def tolerance(self) -> float:
        """Largest relative error that counts as rounding. Real differences are far larger."""
        return 1e-3 if next(self.network.parameters()).dtype == torch.float32 else 6e-2


def load_network(path: str | Path, *, device: str = "auto", dtype: str = "float32") -> PreTrainedModel:
    """
    Load a model by its Hugging Face name or folder. With `dtype` "auto", `chosen_dtype` decides.

    Raises:  ModelError if it cannot be loaded
    """
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # ships no types
    where = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    try:
        config = AutoConfig.from_pretrained(path)
        network: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=chosen_dtype(config.dtype, where) if dtype == "auto" else getattr(torch, dtype),
        )
        torch.nn.Module.to(network, where)
    except (OSError, ValueError, KeyError, RuntimeError) as exc:
        raise ModelError(f"model {str(path)!r} cannot be loaded: {exc}") from exc
    return network


def chosen_dtype(saved: torch.dtype | None, device: str) -> torch.dtype:
    """
    Return the dtype of the saved weights if `device` has instructions for it, else float32.

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


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest expected value."""
    difference = (found.float() - expected.float()).abs().max()
    return float(difference / expected.float().abs().max().clamp(min=1e-6))


def _context_length(config: Any, wanted: int | None) -> int:
    """Return `wanted`, or by default the longest sequence that this engine computes correctly."""
    limits = [int(getattr(config, "max_position_embeddings", 0) or 0) or 2048]
    if getattr(config, "attn_temperature_tuning", False):
        # From this position on, Llama 4 scales queries, by the length of the cache instead of their position.
        limits.append(int(config.floor_scale) - 1)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":  # beyond this length keys are rotated by another table
        original = rope.get("original_max_position_embeddings")
        limits.append(int(original or getattr(config, "original_max_position_embeddings", None) or limits[0]))
    longest = min(limits)
    if wanted is not None and wanted > longest:
        raise ModelError(
            f"max_model_len: found {wanted}; expected at most {longest}, the context of this model"
        )
    return wanted or longest


def _sampling_defaults(network: PreTrainedModel) -> dict[str, float]:
    config = network.generation_config
    values = {} if config is None else config.to_diff_dict()
    return {name: values[name] for name in DRAW_FIELDS if values.get(name) is not None}
