"""
Answers that follow a grammar: which tokens may come next. The only file that loads llguidance.

A grammar is compiled before the answer begins, in threads of its own and within limits, for whoever writes it
is a stranger. While the model computes the logits behind a token, another thread finds what may come there.
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

from kvshare.engines.base import Grammar
from kvshare.errors import ErrorCode, RequestError

MAX_CHARS = 131_072  # of a grammar; 2,000 optional properties of one object take 25,000 and half a second
_COMPILE_S = 10.0  # that a client waits for it
_REASON_CHARS = 200
_LIMITS = LLParserLimits(verbose_errors=False)  # its own, without text of the grammar in errors of a mask


class Grammars:
    """Compiles grammars for one model's tokenizer, which is read when the first one comes (0.3 s)."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """`vocab_size`: of the model's logits."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._read: LLTokenizer | None = None
        self._reading = threading.Lock()
        self._compilers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="kvshare-grammar")
        self._masks = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvshare-mask")

    def close(self) -> None:
        """Let the threads go; answers in progress fail."""
        self._compilers.shutdown(wait=False, cancel_futures=True)
        self._masks.shutdown(wait=False, cancel_futures=True)

    async def compiled(self, grammar: Grammar) -> Constraint:
        """Raises RequestError for a grammar that cannot be followed, or takes too long to compile."""
        if len(grammar.lark) > MAX_CHARS:
            raise _refusal(f"it has {len(grammar.lark)} characters, expected at most {MAX_CHARS}")
        loop = asyncio.get_running_loop()
        try:
            return await asyncio.wait_for(
                loop.run_in_executor(self._compilers, self.compile, grammar), _COMPILE_S
            )
        except TimeoutError:
            raise _refusal(f"it took more than {_COMPILE_S:.0f} s to compile") from None

    def compile(self, grammar: Grammar) -> Constraint:
        """The same in the calling thread, without limits of size and time."""
        matcher = LLMatcher(
            self._tokens(), LLMatcher.grammar_from_lark(grammar.lark), log_level=0, limits=_LIMITS
        )
        if matcher.is_error():
            raise _refusal(_words_of(matcher.get_error()))
        forbidden = _forbidden(matcher, self._vocab_size)
        if matcher.is_error() or bool(forbidden.all()):
            raise _refusal("no answer follows it")
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
                    raise _refusal("no grammar can be followed with this model's tokenizer") from exc
            return self._read


class Constraint:
    """
    One choice's place in a grammar. Used by one thread; the next mask is computed in another meanwhile.

    It is complete where nothing more may come, an end-of-sequence token aside.
    """

    def __init__(
        self, matcher: LLMatcher, forbidden: Future[torch.Tensor], *, vocab_size: int, masks: Executor
    ) -> None:
        self._matcher = matcher
        self._forbidden = forbidden
        self._vocab_size = vocab_size
        self._masks = masks

    def fork(self) -> Constraint:
        """The same place, for another choice."""
        forbidden = self._forbidden
        return Constraint(
            self._matcher.deep_copy(), forbidden, vocab_size=self._vocab_size, masks=self._masks
        )

    def forbidden(self) -> torch.Tensor:
        """
        The tokens that may not come next; end-of-sequence is one of them unless the answer may end here.

        Shapes:  (V,) bool
        Raises:  RuntimeError where the grammar exceeds the limits of a step
        """
        return self._forbidden.result()

    def take(self, token_id: int) -> bool:
        """Go on behind a token that was not forbidden. Returns whether the answer is complete."""
        if not self._matcher.consume_token(token_id):
            raise RuntimeError("the grammar does not go on with a token that it allowed")
        if self._matcher.is_stopped():
            return True
        self._forbidden = self._masks.submit(_next_forbidden, self._matcher, self._vocab_size)
        return False


def _next_forbidden(matcher: LLMatcher, vocab_size: int) -> torch.Tensor:
    forbidden = _forbidden(matcher, vocab_size)
    if matcher.is_error():
        raise RuntimeError(f"no mask: {matcher.stop_reason()}")
    return forbidden


def _forbidden(matcher: LLMatcher, vocab_size: int) -> torch.Tensor:
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    allowed = np.unpackbits(bits, count=vocab_size, bitorder="little")
    return torch.from_numpy(allowed == 0)


def _words_of(error: str) -> str:
    """llguidance's words without its excerpt of the grammar, which may be long."""
    line = error.splitlines()[0].rpartition("failed to compile JSON schema: ")[2]
    if line.startswith("panic"):  # it counts symbols with 16 bits
        return "it is too large"
    return line[:_REASON_CHARS]


def _refusal(reason: str) -> RequestError:
    return RequestError(
        f"the answer cannot be held to this format: {reason}; use a simpler schema, or none",
        param="response_format",
        code=ErrorCode.UNSUPPORTED_FORMAT,
        quoted=[reason],
    )
