"""Turns token ids into text as they come: incremental detokenization and stop strings."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from transformers.convert_slow_tokenizer import bytes_to_unicode

# GPT-2's byte-level alphabet: printable bytes are characters of their own, others are U+0100 and following.
_BYTES = {text: byte for byte, text in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]  # no annotations


def token_text(tokenizer: Tokenizer, token_id: int) -> tuple[str, bytes]:
    """The text and the bytes of a token. If it ends inside a character only the bytes are exact."""
    text: str = tokenizer.decode([token_id], skip_special_tokens=False)
    if "\N{REPLACEMENT CHARACTER}" not in text:
        return text, text.encode()
    piece = tokenizer.id_to_token(token_id) or ""
    if piece.startswith("<0x") and piece.endswith(">"):  # byte fallback of SentencePiece models
        return text, bytes([int(piece[3:-1], 16)])
    if all(character in _BYTES for character in piece):
        return text, bytes(_BYTES[character] for character in piece)
    return text, text.encode()


class Detokenizer:
    """The text of a growing token sequence. An incomplete character is held back."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)

    def add(self, token_id: int) -> str:
        """The text that this token completes; may be empty."""
        try:
            return self._stream.step(self._tokenizer, token_id) or ""
        except Exception:  # noqa: BLE001 - the Rust side raises bare Exception
            # An invalid byte sequence, which a model may sample: start again after it.
            self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
            return "\N{REPLACEMENT CHARACTER}"


@dataclass(slots=True)
class StopMatcher:
    """Holds text back while it could still become a stop string."""

    stops: tuple[str, ...]
    met: str | None = None  # the stop string that ended the text
    _held: str = ""

    def add(self, text: str) -> tuple[str, bool]:
        """Add text. Returns the text that can be emitted, and whether a stop string was found."""
        if not self.stops:
            return text, False
        self._held += text
        found = [(at, stop) for stop in self.stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, self.met = min(found)
            shown, self._held = self._held[:at], ""
            return shown, True
        keep = max(self._overlap(stop) for stop in self.stops)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, False

    def flush(self) -> str:
        """The text that was held back, when no more follows; empty after a stop string."""
        shown, self._held = self._held, ""
        return shown

    def _overlap(self, stop: str) -> int:
        """The length of the longest suffix of the held text with which `stop` begins."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)
