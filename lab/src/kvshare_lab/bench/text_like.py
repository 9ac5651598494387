"""
Prompts that look like text to an index. Words are drawn by Zipf's law; token n is the n-th most common word.

`text_like_prompts`: a header of its own, for half of the prompts one system prompt, and paragraphs, most of
them popular ones. One prompt in five is an earlier one with a stretch rewritten.

`AgentPrompts`: long transcripts of a system prompt, then tool calls and their results. Runs of one task have
the same steps; two runs differ by a few tokens in hundreds of places, and all that follows has moved.
Documents are popular or rare, occur in several tasks, and are opened again in one.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

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
    """The 20,000 most common words of an uncased WordPiece vocabulary, by id. Raises ValueError for fewer."""
    pieces = (piece for piece in sorted(vocabulary, key=vocabulary.__getitem__) if piece.isascii())
    words = [piece for piece in pieces if piece.isalpha() and (len(piece) > 1 or piece in {"a", "i"})]
    if len(words) < _WORDS:
        raise ValueError(f"the vocabulary must have {_WORDS} English words, got {len(words)}")
    return words[:_WORDS]


def zipf(rng: np.random.Generator, count: int, exponent: float) -> Callable[[int], NDArray[np.int32]]:
    """What draws that many of `count` things by Zipf's law; number n is the n-th most common, from 0."""
    weights = 1.0 / np.arange(1, count + 1) ** exponent
    shares = np.cumsum(weights) / weights.sum()
    return lambda number: np.searchsorted(shares, rng.random(number)).astype(np.int32)


def text_like_prompts(rng: np.random.Generator, num_tokens: int) -> Iterator[TokenIds]:
    """Prompts (T,) int32 of T = `num_tokens`, without end. Raises ConfigError for fewer than 64."""
    if num_tokens < MIN_TOKENS:
        raise ConfigError("--prompt-tokens", f"must be at least {MIN_TOKENS}, got {num_tokens}")
    words, popular = zipf(rng, _WORDS, _ZIPF), zipf(rng, _PARAGRAPHS, 1.0)
    paragraphs = words(_PARAGRAPHS * _PARAGRAPH_TOKENS).reshape(_PARAGRAPHS, -1)
    system = words(round(_SYSTEM_FRACTION * num_tokens))
    num_rewritten = max(1, round(_REWRITTEN_FRACTION * num_tokens))
    recent: deque[TokenIds] = deque(maxlen=_RECENT)
    while True:
        if recent and rng.random() < _SHARE_RESUBMITTED:
            prompt = np.array(recent[int(rng.integers(len(recent)))])
            start = int(rng.integers(num_tokens - num_rewritten + 1))
            prompt[start : start + num_rewritten] = words(num_rewritten)
        else:
            parts = [words(_HEADER_TOKENS)]
            if rng.random() < _SHARE_WITH_SYSTEM:
                parts.append(system)
            while sum(map(len, parts)) < num_tokens:
                is_popular = rng.random() < _SHARE_POPULAR
                parts.append(paragraphs[popular(1)[0]] if is_popular else words(_PARAGRAPH_TOKENS))
            prompt = np.concatenate(parts)[:num_tokens]
        recent.append(token_ids(prompt))
        yield recent[-1]


def as_text(prompt: TokenIds, words: Sequence[str]) -> str:
    """A prompt in words for an embedder, without the header and the system prompt."""
    return " ".join(words[token] for token in prompt[-len(prompt) // 2 :].tolist())


class AgentPrompts:
    """
    Transcripts (T,) int32, T about `num_tokens`, over one collection of documents. Runs of a task differ in
    300 places, or in fewer if short. Raises ConfigError for `num_tokens` below 2,000.
    """

    def __init__(self, rng: np.random.Generator, num_tokens: int) -> None:
        if num_tokens < _MIN_TOKENS:
            raise ConfigError("--prompt-tokens", f"must be at least {_MIN_TOKENS}, got {num_tokens}")
        self._rng = rng
        self._num_tokens = num_tokens
        self.num_edits = min(_NUM_EDITS, num_tokens // _TOKENS_PER_EDIT)  # between two runs of a task
        self.words = zipf(rng, _WORDS, _ZIPF)
        self._system, self._call = self.words(_SYSTEM_TOKENS), self.words(_CALL_TOKENS)
        self._documents = [self.words(int(rng.integers(*_DOCUMENT_TOKENS))) for _ in range(_DOCUMENTS)]

    def task(self) -> TokenIds:
        """The first run of a new task, exactly `num_tokens` long."""
        parts, opened = [self._system, self.words(_CALL_TOKENS)], [0]
        while sum(map(len, parts)) < self._num_tokens:
            again = len(opened) > 1 and self._rng.random() < _SHARE_AGAIN
            number = int(self._rng.choice(opened[1:]) if again else self._rng.integers(_DOCUMENTS))
            opened.append(number)
            parts += [self._call, self.words(_STAMP_TOKENS), self._documents[number]]
        return token_ids(np.concatenate(parts)[: self._num_tokens])

    def run_again(self, prompt: TokenIds, *, num_edits: int | None = None) -> TokenIds:
        """The prompt with that many edits at random places, each of 0 to 8 tokens for 0 to 8 others."""
        places = np.sort(self._rng.choice(len(prompt), num_edits or self.num_edits, replace=False))
        parts, at = [], 0
        for place in places.tolist():
            removed, added = self._rng.integers(0, _LONGEST_EDIT + 1, 2).tolist()
            parts += [prompt[at : max(at, place)], self.words(added)]
            at = max(at, place + removed)
        return token_ids(np.concatenate([*parts, prompt[at:]]))
