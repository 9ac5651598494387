"""
Answers that follow a grammar: which tokens may not come next.

Clients write grammars, so separate processes compile and follow them (`kvshare.grammar_pool`). While the
model computes the next logits, such a process computes the mask for them.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum, auto

import numpy as np
import torch
from tokenizers import Tokenizer

from kvshare.conversation.lark import Grammar
from kvshare.errors import UnsupportedFormatError
from kvshare.grammar_pool.frames import Kind
from kvshare.grammar_pool.limits import MAX_CHARS
from kvshare.grammar_pool.matcher import RemoteMatcher
from kvshare.grammar_pool.pool import GrammarPool

_WAIT_S = 0.005  # the longest wait for a reply before other requests have their turn


class Grammars:
    """Compiles grammars for the tokenizer of one model. The tokenizer is read with the first grammar."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """`vocab_size`: the length of the model's logits."""
        self._vocab_size = vocab_size
        self._pool = GrammarPool(
            lambda: {
                "kind": "llguidance",
                "tokenizer": tokenizer.to_str(),
                "vocab_size": max(vocab_size, tokenizer.get_vocab_size()),
                "eos_token_ids": sorted(eos_token_ids),
            }
        )

    def close(self) -> None:
        """End the processes; answers in progress fail."""
        self._pool.close()

    async def compiled(self, grammar: Grammar, *, key: str = "") -> Constraint:
        """
        Compile a grammar. The caller closes the result.

        Raises:  RequestError if it cannot be followed, is too large, or takes too long to compile;
                 OverloadedError if too many grammars of this key wait
        """
        if len(grammar.lark) > MAX_CHARS:
            raise UnsupportedFormatError(
                f"it has {len(grammar.lark)} characters, expected at most {MAX_CHARS}", grammar.param
            )
        matcher, mask = await self._pool.compiled({"lark": grammar.lark}, key=key, param=grammar.param)
        forbidden = _forbidden(mask, self._vocab_size)
        if bool(forbidden.all()):
            matcher.close()
            raise UnsupportedFormatError("no answer follows it", grammar.param)
        return Constraint(matcher, forbidden)


class GrammarState(Enum):
    """The state of a choice in its grammar."""

    PENDING = auto()  # the last token is not taken yet
    GOING_ON = auto()
    ENDED = auto()  # the answer is complete: only an end-of-sequence token could come next


class Constraint:
    """A compiled grammar, in its first state."""

    def __init__(self, matcher: RemoteMatcher, forbidden: torch.Tensor) -> None:
        self._matcher = matcher
        self._forbidden = forbidden

    @property
    def pid(self) -> int | None:
        return self._matcher.pid

    def choice(self, number: int) -> ConstrainedChoice:
        """Begin a choice in the first state. Each choice of an answer has another number."""
        return ConstrainedChoice(self._matcher, self._forbidden, number)

    def close(self) -> None:
        """Release the grammar's process. No choice can be continued after this."""
        self._matcher.close()


class ConstrainedChoice:
    """
    The state of one choice in its grammar.

    Each method waits some milliseconds at most, and raises UnsupportedFormatError if the grammar cannot be
    followed any further.
    """

    def __init__(self, matcher: RemoteMatcher, forbidden: torch.Tensor, number: int) -> None:
        self._matcher = matcher
        self._number = number
        self._forbidden: torch.Tensor | None = forbidden
        self._vocab_size = len(forbidden)
        self._is_pending = False

    def forbidden(self) -> torch.Tensor | None:
        """
        Return which tokens may not come next; None while that is not known.

        These include end-of-sequence tokens, unless the answer may end here.

        Shapes:  (V,) bool
        """
        if self._forbidden is None and self.state() is GrammarState.GOING_ON:
            frame = self._matcher.poll(self._number, wait_s=_WAIT_S)
            if frame is not None:
                self._forbidden = _forbidden(frame.payload, self._vocab_size)
        return self._forbidden

    def take(self, token_id: int) -> None:
        self._forbidden, self._is_pending = None, True
        self._matcher.take(self._number, token_id)

    def state(self, *, waits: bool = True) -> GrammarState:
        """Return the state after the last token. `waits`: wait for the grammar's reply if necessary."""
        if self._is_pending:
            wait_s = _WAIT_S if waits else 0.0
            frame = self._matcher.poll(self._number, wait_s=wait_s)
            while frame is not None and frame.kind is Kind.MASK:  # of an earlier token
                frame = self._matcher.poll(self._number, wait_s=wait_s)
            if frame is None:
                return GrammarState.PENDING
            self._is_pending = False
            if frame.kind is Kind.ENDED:
                return GrammarState.ENDED
        return GrammarState.GOING_ON


def _forbidden(mask: bytes, vocab_size: int) -> torch.Tensor:
    forbidden = np.unpackbits(~np.frombuffer(mask, dtype=np.uint8), count=vocab_size, bitorder="little")
    return torch.from_numpy(forbidden.view(np.bool_))
