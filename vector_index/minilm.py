"""
The bundled embedder, all-MiniLM-L6-v2, computed by torch alone.

sentence-transformers computes the same vectors, but its import takes two seconds, with scikit-learn and
scipy: a fifth of a server's start.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch.nn import functional

_LAYERS, _HEADS, _EPSILON = 6, 12, 1e-12


class MiniLM:
    """BERT of six layers; a text's vector is the mean of its tokens' outputs, of length one."""

    dimension = 384
    max_tokens = 256

    def __init__(self, folder: Path, device: str) -> None:
        """Read `model.safetensors` and `tokenizer.json`. Raises OSError, and what the libraries raise."""
        self._weights = load_file(folder / "model.safetensors", device=device)
        self._device = device
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        end = self._tokenizer.token_to_id("[SEP]")
        assert end is not None, "BERT's vocabulary has it"
        self._end = end

    def vocabulary(self) -> Mapping[str, int]:
        return self._tokenizer.get_vocab()

    def num_tokens(self, text: str) -> int:
        """Count all tokens of a text, with the two that frame it."""
        return len(self._tokenizer.encode(text).ids)

    @torch.inference_mode()
    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return unit vectors (N, D) float32; of each text the first `max_tokens` tokens are read."""
        rows = [self._read(encoding.ids) for encoding in self._tokenizer.encode_batch(list(texts))]
        ids = torch.zeros((len(rows), max(map(len, rows))), dtype=torch.int64)  # (N, T)
        is_text = torch.zeros(ids.shape, dtype=torch.bool)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = torch.tensor(row)
            is_text[number, : len(row)] = True
        is_text = is_text.to(self._device)
        outputs = self._outputs(ids.to(self._device), is_text)
        weights = is_text[:, :, None].to(outputs.dtype)
        means = (outputs * weights).sum(1) / weights.sum(1)  # (N, T, D) -> (N, D)
        return functional.normalize(means.float(), dim=1).cpu().numpy()

    def _read(self, ids: list[int]) -> list[int]:
        return ids if len(ids) <= self.max_tokens else [*ids[: self.max_tokens - 1], self._end]

    def _outputs(self, ids: torch.Tensor, is_text: torch.Tensor) -> torch.Tensor:
        """Return the last layer's outputs (N, T, D) for token ids (N, T)."""
        names = ("word", "position", "token_type")
        words, places, kinds = (self._weights[f"embeddings.{name}_embeddings.weight"] for name in names)
        hidden = self._norm("embeddings", words[ids] + places[: ids.shape[1]] + kinds[0])
        for layer in range(_LAYERS):
            name = f"encoder.layer.{layer}"
            attended = self._attend(f"{name}.attention.self", hidden, is_text)
            attended = self._linear(f"{name}.attention.output.dense", attended)
            hidden = self._norm(f"{name}.attention.output", hidden + attended)
            inner = functional.gelu(self._linear(f"{name}.intermediate.dense", hidden))
            hidden = self._norm(f"{name}.output", hidden + self._linear(f"{name}.output.dense", inner))
        return hidden

    def _attend(self, name: str, hidden: torch.Tensor, is_text: torch.Tensor) -> torch.Tensor:
        """Every token attends to all tokens of its text, in both directions."""
        q, k, v = (self._heads(self._linear(f"{name}.{role}", hidden)) for role in ("query", "key", "value"))
        attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=is_text[:, None, None])
        return attended.transpose(1, 2).flatten(2)  # (N, H, T, d) -> (N, T, D)

    def _heads(self, rows: torch.Tensor) -> torch.Tensor:
        """Split heads: (N, T, D) -> (N, H, T, d)."""
        return rows.view(*rows.shape[:2], _HEADS, -1).transpose(1, 2)

    def _linear(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        return functional.linear(rows, self._weights[f"{name}.weight"], self._weights[f"{name}.bias"])

    def _norm(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        weight, bias = (self._weights[f"{name}.LayerNorm.{each}"] for each in ("weight", "bias"))
        return functional.layer_norm(rows, (self.dimension,), weight, bias, _EPSILON)
