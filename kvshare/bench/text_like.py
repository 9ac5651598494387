"""
Prompts that look like text to an index. Words are drawn by Zipf's law; token n is the n-th most common word.

`TextLikePrompts`: a header of its own, for half of the prompts one system prompt, and paragraphs, most of
them popular ones. One prompt in five is an earlier one with a stretch rewritten.

`AgentPrompts`: long transcripts of a system prompt, then tool calls and their results. Runs of one task have
the same steps; two runs differ by a few tokens in hundreds of places, and all that follows has moved.
Documents are popular or rare, occur in several tasks, and are opened again in one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from delta_tree import TokenIds, token_ids
from kvshare.errors import ConfigError

MIN_TOKENS = 64
_WORDS, _ZIPF = 20_000, 1.1
_PARAGRAPHS, _PARAGRAPH_TOKENS = 5000, 80
_HEADER_TOKENS = 24
_SHARE_WITH_SYSTEM, _SHARE_POPULAR, _SHARE_RESUBMITTED = 0.5, 0.6, 0.2
_SYSTEM_FRACTION, _REWRITTEN_FRACTION = 0.4, 0.1
_RECENT = 1000  # prompts that may be sent again

# Of agents' transcripts.
_NUM_EDITS, _LONGEST_EDIT = 300, 8
_TOKENS_PER_EDIT = 40  # at least: tokens between two closer edits are computed again, too
_MIN_TOKENS = 2000  # shorter ones would be little more than the system prompt
_SYSTEM_TOKENS, _CALL_TOKENS, _STAMP_TOKENS = 1200, 30, 12
_DOCUMENTS, _DOCUMENT_TOKENS = 2000, (200, 1200)
_SHARE_AGAIN = 0.15  # of the steps: they open a document that the transcript has already


def common_words(vocabulary: Mapping[str, int]) -> list[str]:
    """
    The 20,000 most common words of an uncased WordPiece vocabulary, whose ids are in the order of frequency.

    Raises:  ValueError if it has fewer words
    """
    words = [word for word in sorted(vocabulary, key=vocabulary.__getitem__) if _is_word(word)]
    if len(words) < _WORDS:
        raise ValueError(f"the vocabulary must have {_WORDS} English words, got {len(words)}")
    return words[:_WORDS]


def _is_word(piece: str) -> bool:
    return piece in {"a", "i"} or (len(piece) > 1 and piece.isascii() and piece.isalpha())


class ZipfWords:
    """Tokens as common as the words of a text: the n-th most common is token n."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._cumulated = _cumulated(_WORDS, _ZIPF)

    def __call__(self, count: int) -> NDArray[np.int32]:
        return np.searchsorted(self._cumulated, self._rng.random(count)).astype(np.int32)


def _cumulated(count: int, exponent: float) -> NDArray[np.float64]:
    """By Zipf's law: the share of the most common of `count` things, of the first two, ... of all."""
    weights = 1.0 / np.arange(1, count + 1) ** exponent
    shares: NDArray[np.float64] = np.cumsum(weights) / weights.sum()
    return shares


class TextLikePrompts:
    """An endless stream of prompts of one length."""

    def __init__(self, rng: np.random.Generator, num_tokens: int) -> None:
        if num_tokens < MIN_TOKENS:
            raise ConfigError("--prompt-tokens", f"must be at least {MIN_TOKENS}, got {num_tokens}")
        self._rng = rng
        self.num_tokens = num_tokens
        self._words = ZipfWords(rng)
        self._paragraphs = self._words(_PARAGRAPHS * _PARAGRAPH_TOKENS).reshape(_PARAGRAPHS, -1)
        self._popularity = _cumulated(_PARAGRAPHS, 1.0)
        self._system = self._words(round(_SYSTEM_FRACTION * num_tokens))
        self._recent: deque[TokenIds] = deque(maxlen=_RECENT)

    def draw(self) -> TokenIds:
        """The next prompt."""
        if self._recent and self._rng.random() < _SHARE_RESUBMITTED:
            prompt = self._rewritten(self._recent[int(self._rng.integers(len(self._recent)))])
        else:
            prompt = self._fresh()
        self._recent.append(prompt)
        return prompt

    def text(self, prompt: TokenIds, words: Sequence[str]) -> str:
        """The prompt in words for an embedder, without the header and the system prompt."""
        return " ".join(words[token] for token in prompt[-self.num_tokens // 2 :].tolist())

    def _fresh(self) -> TokenIds:
        parts = [self._words(_HEADER_TOKENS)]
        if self._rng.random() < _SHARE_WITH_SYSTEM:
            parts.append(self._system)
        while sum(map(len, parts)) < self.num_tokens:
            if self._rng.random() < _SHARE_POPULAR:
                parts.append(self._paragraphs[np.searchsorted(self._popularity, self._rng.random())])
            else:
                parts.append(self._words(_PARAGRAPH_TOKENS))
        return token_ids(np.concatenate(parts)[: self.num_tokens])

    def _rewritten(self, prompt: TokenIds) -> TokenIds:
        length = max(1, round(_REWRITTEN_FRACTION * len(prompt)))
        start = int(self._rng.integers(len(prompt) - length + 1))
        changed = np.array(prompt)
        changed[start : start + length] = self._words(length)
        return token_ids(changed)


class AgentPrompts:
    """
    Transcripts over one collection of documents. Runs of a task differ in 300 places, or in fewer if short.

    Shapes:  each (T,) int32, T about `num_tokens`
    Raises:  ConfigError for `num_tokens` below 2,000
    """

    def __init__(self, rng: np.random.Generator, num_tokens: int) -> None:
        if num_tokens < _MIN_TOKENS:
            raise ConfigError("--prompt-tokens", f"must be at least {_MIN_TOKENS}, got {num_tokens}")
        self._rng = rng
        self._num_tokens = num_tokens
        self.num_edits = min(_NUM_EDITS, num_tokens // _TOKENS_PER_EDIT)  # between two runs of a task
        self._words = ZipfWords(rng)
        self._system, self._call = self._words(_SYSTEM_TOKENS), self._words(_CALL_TOKENS)
        self._documents = [self._words(int(rng.integers(*_DOCUMENT_TOKENS))) for _ in range(_DOCUMENTS)]

    def task(self) -> TokenIds:
        """The first run of a new task, exactly `num_tokens` long."""
        parts, opened = [self._system, self._words(_CALL_TOKENS)], [0]
        while sum(map(len, parts)) < self._num_tokens:
            again = len(opened) > 1 and self._rng.random() < _SHARE_AGAIN
            number = int(self._rng.choice(opened[1:]) if again else self._rng.integers(_DOCUMENTS))
            opened.append(number)
            parts += [self._call, self._words(_STAMP_TOKENS), self._documents[number]]
        return token_ids(np.concatenate(parts)[: self._num_tokens])

    def run_again(self, prompt: TokenIds, *, num_edits: int | None = None) -> TokenIds:
        """The prompt with that many edits at random places, each of 0 to 8 tokens for 0 to 8 others."""
        num_edits = self.num_edits if num_edits is None else num_edits
        places = np.sort(self._rng.choice(len(prompt), num_edits, replace=False))
        parts, at = [], 0
        for place in places.tolist():
            removed, added = self._rng.integers(0, _LONGEST_EDIT + 1, 2).tolist()
            parts += [prompt[at : max(at, place)], self._words(added)]
            at = max(at, place + removed)
        return token_ids(np.concatenate([*parts, prompt[at:]]))

    def short(self, num_tokens: int) -> TokenIds:
        """A question that is unrelated to any task."""
        return token_ids(self._words(num_tokens))
