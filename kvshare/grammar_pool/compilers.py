"""
The compilers of a worker. Each library is imported when it is first needed.

The embedded engine's workers follow grammars with llguidance. A relay's workers only try what vLLM will do
with a request: `vllm_formats.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from llguidance import LLMatcher

_REASON_CHARS = 200


class UnsupportedGrammarError(Exception):
    """The requested format cannot be followed. The message says why, for the client."""


class Matcher(Protocol):
    """The state of one answer in its grammar."""

    def mask(self) -> bytes:
        """Return the tokens that may come next, a bit each. Raises UnsupportedGrammarError at limits."""

    def take(self, token_id: int) -> bool:
        """Advance by a token. Returns whether the answer is complete."""

    def copy(self) -> Matcher: ...


class Compiler(Protocol):
    """Compiles for one tokenizer."""

    def compile(self, request: Mapping[str, Any]) -> Matcher | None:
        """None: it compiles, and no answer is followed here. Raises UnsupportedGrammarError."""


def new_compiler(setup: Mapping[str, Any]) -> Compiler:
    """Return the compiler that the first frame asks for. Raises UnsupportedGrammarError."""
    if setup["kind"] == "vllm":
        from kvshare.grammar_pool.vllm_formats import VllmFormats

        return VllmFormats()
    return LlguidanceCompiler(setup)


class LlguidanceCompiler:
    """Grammars in the Lark dialect, for answers that are followed token by token."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        """
        `setup`: `tokenizer`, the JSON of a fast one; `vocab_size`, of the logits; `eos_token_ids`.

        Raises:  UnsupportedGrammarError for a tokenizer that llguidance cannot read
        """
        from llguidance import LLParserLimits, LLTokenizer

        try:
            self._tokenizer = LLTokenizer(
                setup["tokenizer"], n_vocab=setup["vocab_size"], eos_token=setup["eos_token_ids"] or None
            )
        except ValueError:
            raise UnsupportedGrammarError("no grammar can be followed with this model's tokenizer") from None
        # The default limits. Errors do not quote the grammar.
        self._limits = LLParserLimits(verbose_errors=False)

    def compile(self, request: Mapping[str, Any]) -> LlguidanceMatcher:
        """`request`: `lark`."""
        from llguidance import LLMatcher

        grammar = LLMatcher.grammar_from_lark(request["lark"])
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise UnsupportedGrammarError(short_message(matcher.get_error()))
        return LlguidanceMatcher(matcher)


class LlguidanceMatcher:
    """An answer that follows a grammar of llguidance."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def mask(self) -> bytes:
        bits: bytes = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            if self._matcher.get_error().startswith("NoExtension"):
                raise UnsupportedGrammarError("no answer follows it")
            raise UnsupportedGrammarError("it takes too long to find which tokens may come next")
        return bits

    def take(self, token_id: int) -> bool:
        if not self._matcher.consume_token(token_id):
            raise UnsupportedGrammarError("the grammar rejects a token that its mask allowed")
        return bool(self._matcher.is_stopped())

    def copy(self) -> LlguidanceMatcher:
        return LlguidanceMatcher(self._matcher.deep_copy())


def short_message(error: str) -> str:
    """Return the message of llguidance in one line, without its excerpt of the grammar, which may be long."""
    lines = [line.strip() for line in error.splitlines() if line.strip()] or ["it does not compile"]
    line = lines[0].rpartition("failed to compile JSON schema: ")[2]
    if line.startswith("panic"):  # llguidance counts symbols with 16 bits
        return "it is too large"
    if line.endswith(":"):  # of a pattern: then come the pattern, a mark below it, and what is wrong there
        what = next((each for each in lines if each.startswith("error: ")), "")
        line = f"{line} {what.removeprefix('error: ')}"
    return line[:_REASON_CHARS]
