"""
Answers that follow a grammar: the tokens that may come next. Only this file imports llguidance.

Clients write grammars, so they are compiled within limits, in threads of their own, before the answer begins.
While the model computes the next logits, another thread computes the mask for them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection
from concurrent.futures import Executor, Future, ThreadPoolExecutor

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

from kvshare.conversation.lark import Grammar
from kvshare.errors import ErrorCode, RequestError

MAX_CHARS = 131_072  # of a grammar; 2,000 optional properties of one object take 25,000 and half a second
_COMPILE_S = 10.0  # after which compiling fails
_REASON_CHARS = 200
_LIMITS = LLParserLimits(verbose_errors=False)  # the default limits; errors do not quote the grammar


class Grammars:
    """Compiles grammars for the tokenizer of one model, which is read for the first grammar (0.3 s)."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """`vocab_size`: the length of the model's logits."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._read: LLTokenizer | None = None
        self._reading = threading.Lock()
        self._compilers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="kvshare-grammar")
        self._masks = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvshare-mask")

    def close(self) -> None:
        """End the threads; answers in progress fail."""
        self._compilers.shutdown(wait=False, cancel_futures=True)
        self._masks.shutdown(wait=False, cancel_futures=True)

    async def compiled(self, grammar: Grammar) -> Constraint:
        """Raises RequestError if it cannot be followed, is too large, or takes too long to compile."""
        if len(grammar.lark) > MAX_CHARS:
            raise _unsupported(f"it has {len(grammar.lark)} characters, expected at most {MAX_CHARS}")
        loop = asyncio.get_running_loop()
        try:
            return await asyncio.wait_for(
                loop.run_in_executor(self._compilers, self.compile, grammar), _COMPILE_S
            )
        except TimeoutError:
            raise _unsupported(f"it took more than {_COMPILE_S:.0f} s to compile") from None

    def compile(self, grammar: Grammar) -> Constraint:
        """The same in the calling thread, without limits on size and time."""
        matcher = LLMatcher(
            self._tokens(), LLMatcher.grammar_from_lark(grammar.lark), log_level=0, limits=_LIMITS
        )
        if matcher.is_error():
            raise _unsupported(_short_message(matcher.get_error()))
        forbidden = _forbidden(matcher, self._vocab_size)
        if matcher.is_error() or bool(forbidden.all()):
            raise _unsupported("no answer follows it")
        first: Future[torch.Tensor] = Future()
        first.set_result(forbidden)
        return Constraint(matcher, first, vocab_size=self._vocab_size, masks=self._masks)

    def _tokens(self) -> LLTokenizer:
        """Raises RequestError for a tokenizer that llguidance cannot read."""
        with self._reading:
            if self._read is None:
                try:
                    self._read = LLTokenizer(
                        self._tokenizer.to_str(),
                        n_vocab=max(self._vocab_size, self._tokenizer.get_vocab_size()),
                        eos_token=self._eos_token_ids or None,
                    )
                except ValueError as exc:
                    raise _unsupported("no grammar can be followed with this model's tokenizer") from exc
            return self._read


class Constraint:
    """
    The state of one choice in a grammar. One thread uses it, while another computes the next mask.

    An answer is complete where only an end-of-sequence token may come next.
    """

    def __init__(
        self, matcher: LLMatcher, forbidden: Future[torch.Tensor], *, vocab_size: int, masks: Executor
    ) -> None:
        self._matcher = matcher
        self._forbidden = forbidden
        self._vocab_size = vocab_size
        self._masks = masks

    def fork(self) -> Constraint:
        """The same state, for another choice."""
        forbidden = self._forbidden
        return Constraint(
            self._matcher.deep_copy(), forbidden, vocab_size=self._vocab_size, masks=self._masks
        )

    def forbidden(self) -> torch.Tensor:
        """
        The tokens that may not come next. End-of-sequence is one of them unless the answer may end here.

        Shapes:  (V,) bool
        Raises:  RuntimeError if computing the mask exceeds the limits of llguidance
        """
        return self._forbidden.result()

    def take(self, token_id: int) -> bool:
        """Advance by a token that was not forbidden. Returns whether the answer is complete."""
        if not self._matcher.consume_token(token_id):
            raise RuntimeError("the grammar rejects a token that its mask allowed")
        if self._matcher.is_stopped():
            return True
        self._forbidden = self._masks.submit(_next_forbidden, self._matcher, self._vocab_size)
        return False


def _next_forbidden(matcher: LLMatcher, vocab_size: int) -> torch.Tensor:
    forbidden = _forbidden(matcher, vocab_size)
    if matcher.is_error():
        raise RuntimeError(f"the mask of a grammar cannot be computed: {matcher.stop_reason()}")
    return forbidden


def _forbidden(matcher: LLMatcher, vocab_size: int) -> torch.Tensor:
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    allowed = np.unpackbits(bits, count=vocab_size, bitorder="little")
    return torch.from_numpy(allowed == 0)


def _short_message(error: str) -> str:
    """The message of llguidance without its excerpt of the grammar, which may be long."""
    line = error.splitlines()[0].rpartition("failed to compile JSON schema: ")[2]
    if line.startswith("panic"):  # llguidance counts symbols with 16 bits
        return "it is too large"
    return line[:_REASON_CHARS]


def _unsupported(reason: str) -> RequestError:
    return RequestError(
        f"the answer cannot be constrained to this format: {reason}; use a simpler schema, or none",
        param="response_format",
        code=ErrorCode.UNSUPPORTED_FORMAT,
        quoted=[reason],
    )
