"""
Long prompts like an agent's transcripts: a system prompt, then calls and their results, run again and again.

Runs of one task have the same steps; between two runs hundreds of places differ by a few tokens, and all that
follows has moved. Documents are popular or rare, come up in several tasks, and are opened twice in one.
"""

from __future__ import annotations

import numpy as np

from delta_tree import TokenIds, token_ids
from kvshare.bench.text_like import ZipfWords
from kvshare.errors import ConfigError

_NUM_EDITS, _LONGEST_EDIT = 300, 8
_TOKENS_PER_EDIT = 40  # at the least: what is between two edits that are closer is computed again with them
_MIN_TOKENS = 2000  # or little is there beside the system prompt
_SYSTEM_TOKENS, _CALL_TOKENS, _STAMP_TOKENS = 1200, 30, 12
_DOCUMENTS, _DOCUMENT_TOKENS = 2000, (200, 1200)
_SHARE_AGAIN = 0.15  # of the steps, that open a document which the transcript has already


class AgentPrompts:
    """
    Transcripts over one collection of documents. Runs of a task differ in 300 places, short ones in fewer.

    Shapes:  each (T,) int32, T about `num_tokens`
    Raises:  ConfigError where they are to be too short
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
        """The prompt with that many edits, each of 0 to 8 tokens for 0 to 8 others, evenly drawn."""
        num_edits = self.num_edits if num_edits is None else num_edits
        places = np.sort(self._rng.choice(len(prompt), num_edits, replace=False))
        parts, at = [], 0
        for place in places.tolist():
            removed, added = self._rng.integers(0, _LONGEST_EDIT + 1, 2).tolist()
            parts += [prompt[at : max(at, place)], self._words(added)]
            at = max(at, place + removed)
        return token_ids(np.concatenate([*parts, prompt[at:]]))

    def short(self, num_tokens: int) -> TokenIds:
        """A question that has nothing to do with any task."""
        return token_ids(self._words(num_tokens))
