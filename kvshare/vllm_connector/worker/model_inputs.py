"""
The inputs of our passes to vLLM's model: token ids or embeddings, and positions in the form that it expects.

If a model may get media, or prompts as embeddings, vLLM's runners always pass embeddings, even if a batch is
all text. A compiled model was traced with embeddings, and vLLM drops the guards that would notice token ids.
Text has the same position in each row of M-RoPE.

Alphabet: N tokens, M rows of positions, E width of an embedding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.lora.layers import LoRAMapping
from vllm.model_executor.models.interfaces import requires_raw_input_tokens


class ModelInputs:
    """Makes the arguments of one model."""

    def __init__(
        self, model: Any, config: VllmConfig, device: torch.device, *, own: ModelConfig | None = None
    ) -> None:
        """`own`: the configuration of `model`, if it is not the model of `config`."""
        own = own or config.model_config
        self._model = model
        self._may_get_media = bool(own.supports_multimodal_inputs)
        self._takes_embeddings = self._may_get_media or bool(own.enable_prompt_embeds)
        self._takes_ids = not self._takes_embeddings or requires_raw_input_tokens(model)
        self._dtype: torch.dtype = own.dtype
        self._max_tokens = int(config.scheduler_config.max_num_batched_tokens)
        self._rows: torch.Tensor | None = None
        if own.uses_mrope:
            # As wide as vLLM's own buffer: the stride between rows is a constant of the compiled model.
            width = config.scheduler_config.max_num_batched_tokens + 1
            self._rows = torch.zeros((own.mrope_num_dims, width), dtype=torch.int64, device=device)

    def arguments(self, token_ids: torch.Tensor, positions: torch.Tensor) -> dict[str, torch.Tensor | None]:
        """
        Return the arguments of a call of the model. They are valid until the next call of this method.

        Shapes:  token_ids (N,) int32; positions (N,) int64
        """
        return {
            "input_ids": token_ids if self._takes_ids else None,
            "inputs_embeds": self._embeddings(token_ids) if self._takes_embeddings else None,
            "positions": self._positions(positions),
        }

    def _embeddings(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of text, (N, E). Not cached: a model may note them for its next pass."""
        options: dict[str, Any] = {}
        if self._may_get_media:
            options = {
                "multimodal_embeddings": [],
                "is_multimodal": torch.zeros_like(token_ids, dtype=torch.bool),
            }
        embedded: torch.Tensor = self._model.embed_input_ids(token_ids, **options)
        return embedded.to(self._dtype)

    @contextmanager
    def notes_set_aside(self, num_tokens: int) -> Iterator[None]:
        """
        Set the model's notes aside, and put them back at the end.

        A model may note what it embeds for its next pass: embeddings of each layer (Gemma 4), images for
        several layers (Qwen3-VL). Loads that join a step are computed after vLLM has embedded the step's
        batch and before it computes it: our rows must not see the notes of the batch.
        """
        if not self._takes_embeddings:
            yield
            return
        counts = {name: value for name, value in vars(self._model).items() if type(value) is int}
        aside = [notes[:num_tokens].clone() for notes in self._notes()]
        for notes in self._notes():
            notes[:num_tokens] = 0
        try:
            yield
        finally:
            for notes, rows in zip(self._notes(), aside, strict=True):
                notes[:num_tokens] = rows
            vars(self._model).update(counts)

    def _notes(self) -> list[torch.Tensor]:
        """Return the model's buffers that have a row for each token of a batch."""
        values = vars(self._model).values()
        parts = (part for value in values for part in (value if isinstance(value, list) else (value,)))
        return [
            part
            for part in parts
            if isinstance(part, torch.Tensor)
            and part.is_floating_point()
            and part.dim() > 1
            and len(part) >= self._max_tokens
        ]

    def _positions(self, positions: torch.Tensor) -> torch.Tensor:
        """Return (N,), or (M, N) for M-RoPE."""
        if self._rows is None:
            return positions
        rows = self._rows[:, : len(positions)]
        rows[:] = positions
        return rows


@contextmanager
def base_model(adapters: Any, num_tokens: int, num_runs: int) -> Iterator[None]:
    """
    Compute a pass without LoRA adapters. `adapters`: vLLM's manager; None if there is none.

    vLLM's kernels read from the last mapping which row has which adapter. Our pass sets another one, and
    restores that of the batch, whose logits may be computed after our pass.
    """
    if adapters is None:
        yield
        return
    of_batch = adapters._adapter_manager._last_mapping  # there is no public query
    adapters.set_active_adapters(set(), LoRAMapping((0,) * num_tokens, (0,) * num_runs, is_prefill=True))
    try:
        yield
    finally:
        if of_batch is not None:
            adapters.set_active_adapters(set(), of_batch)
