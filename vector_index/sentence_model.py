"""Other embedders than the bundled one, by sentence-transformers. This is the only file that imports it."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from transformers.utils import logging as transformers_logging

from vector_index.errors import EmbedderError


class SentenceModel:
    """A sentence-transformers model by name or path."""

    def __init__(self, name_or_path: str, device: str) -> None:
        # transformers draws a progress bar while it loads weights; only this call turns it off.
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # no annotations
        self._model = SentenceTransformer(name_or_path, device=device)
        dimension = self._model.get_embedding_dimension()
        if dimension is None:
            raise EmbedderError(f"embedder {name_or_path} does not report its dimension")
        self.dimension = dimension
        limit = self._model.max_seq_length
        self.max_tokens = None if limit is None else int(limit)
        # What `encode` puts before each text, of models that want it.
        self._prefix = (self._model.prompts or {}).get(self._model.default_prompt_name or "") or ""

    def vocabulary(self) -> Mapping[str, int]:
        vocabulary: Mapping[str, int] = self._model.tokenizer.get_vocab()
        return vocabulary

    def num_tokens(self, text: str) -> int:
        """Count all tokens of a text, also those that `encode` does not read."""
        encoded = self._model.tokenizer(
            self._prefix + text,
            truncation=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return len(encoded["input_ids"])

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return unit vectors (N, D) float32."""
        vectors: NDArray[np.float32] = self._model.encode(
            list(texts), batch_size=len(texts), show_progress_bar=False, normalize_embeddings=True
        )
        return vectors
