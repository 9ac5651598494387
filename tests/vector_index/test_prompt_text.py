"""Which parts of a prompt are embedded, and how they become one vector."""

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from vector_index import EmbedderError, PromptText, embed_prompts, windows


class LetterEmbedder:
    """A vector per text: how often each of a, b and c occurs."""

    name = "letters"
    dimension = 3

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        counts = np.array([[text.count(c) for c in "abc"] for text in texts], dtype=np.float32)
        unit: NDArray[np.float32] = counts / np.maximum(np.linalg.norm(counts, axis=1, keepdims=True), 1e-9)
        return unit


class BadEmbedder(LetterEmbedder):
    """Answers with too few vectors."""

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        return super().embed(texts)[:-1]


def test_a_long_prompt_gives_head_tail_and_last_turn() -> None:
    """Three windows, none longer than asked for, each from its own place."""
    prompt = PromptText("question?" * 200, "h" * 1000 + "m" * 500 + "t" * 1000)
    assert windows(prompt) == (("question?" * 200)[:1000], "h" * 1000, "t" * 1000)


def test_equal_windows_are_read_once() -> None:
    """A short prompt whose body is the user turn is one window."""
    assert windows(PromptText("hello", "hello")) == ("hello",)
    assert windows(PromptText("hello", "  ")) == ("hello",)


def test_a_prompt_without_text_has_no_window_and_no_vector() -> None:
    """Blank text is not embedded, and does not disturb its neighbours in a batch."""
    blank, other = PromptText("", " \n"), PromptText("a", "a")
    assert windows(blank) == ()
    assert embed_prompts(LetterEmbedder(), [blank]) == [None]
    first, second = embed_prompts(LetterEmbedder(), [blank, other])
    assert first is None
    assert second is not None
    assert second.tolist() == [1.0, 0.0, 0.0]


def test_the_vector_is_the_unit_mean_of_the_windows() -> None:
    """Windows count alike, and the mean has length 1."""
    (vector,) = embed_prompts(LetterEmbedder(), [PromptText("aa", "b" * 1000 + "c" * 1000)])
    assert vector is not None
    assert vector.dtype == np.float32
    assert vector.tolist() == pytest.approx([3**-0.5] * 3)


def test_a_wrong_number_of_vectors_is_an_error() -> None:
    """An embedder that breaks its promise cannot mix up whose vector is whose."""
    with pytest.raises(EmbedderError, match="shape"):
        embed_prompts(BadEmbedder(), [PromptText("a", "b")])
