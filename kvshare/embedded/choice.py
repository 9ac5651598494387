"""One of the n completions of a request: samples tokens, turns them into text, and decides when it ends."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from transformers.convert_slow_tokenizer import bytes_to_unicode

from kvshare.embedded.decoder import RunningSequence
from kvshare.embedded.grammar import Constraint, GrammarState
from kvshare.embedded.held_logprobs import HeldLogprobs
from kvshare.embedded.recording import Recording
from kvshare.embedded.sampling import Draw, Sampler
from kvshare.engine import FinishReason, GenerationRequest

# GPT-2's byte-level alphabet: printable bytes stand for themselves, others are U+0100 and following.
_BYTES = {text: byte for byte, text in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]  # no annotations

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how SentencePiece writes the space before a word


def token_text(tokenizer: Tokenizer, token_id: int) -> tuple[str, bytes]:
    """Return the text and the bytes of a token. If it ends inside a character, only the bytes are exact."""
    text: str = tokenizer.decode([token_id], skip_special_tokens=False)
    piece = tokenizer.id_to_token(token_id) or ""
    if piece.startswith(_SPACE) and not text.startswith(" "):  # SentencePiece drops it at the start of a text
        text = f" {text}"
    if "\N{REPLACEMENT CHARACTER}" not in text:
        return text, text.encode()
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
        """Return the text that this token completes; it may be empty."""
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
        """Return the text that was held back, when no more follows; empty after a stop string."""
        shown, self._held = self._held, ""
        return shown

    def _overlap(self, stop: str) -> int:
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)


@dataclass(frozen=True, slots=True)
class Decoding:
    """The settings that all choices of a request have in common."""

    tokenizer: Tokenizer
    draw: Draw
    eos_token_ids: frozenset[int]
    max_tokens: int
    constraint: Constraint | None = None  # in its first state


class Choice:
    """The state of one choice: its tokens so far, and why it ended."""

    def __init__(
        self,
        request: GenerationRequest,
        decoding: Decoding,
        *,
        index: int,
        kv: RunningSequence,
        recording: Recording | None = None,
    ) -> None:
        """`kv` holds the prompt. `recording`: where the first tokens are noted, if anywhere."""
        self.index, self.kv = index, kv
        self._recording = recording
        self.generated: list[int] = []
        self.num_decoded = 0  # characters, including those of a stop string
        self.finish_reason: FinishReason | None = None
        sampling = self._sampling = request.sampling
        self.stops = StopMatcher(sampling.stop)
        self.num_shown = 0  # characters that were emitted
        self.logprobs = HeldLogprobs()
        stops = frozenset(sampling.stop_token_ids)
        ends = stops | decoding.eos_token_ids
        self._ends = stops if sampling.ignore_eos else ends  # they end the text, and do not belong to it
        self._max_tokens = decoding.max_tokens
        self._constraint = None if decoding.constraint is None else decoding.constraint.choice(index)
        self.is_pending = False  # it is not known yet whether the last token completes the answer
        self._sampler = Sampler(
            sampling, decoding.draw, choice=index, prompt=request.prompt.token_ids, ends=ends
        )
        self._detokenizer = Detokenizer(decoding.tokenizer, skip_special_tokens=sampling.skip_special_tokens)

    def take(self, logits: torch.Tensor) -> tuple[int, str] | None:
        """
        Sample the next token. Returns it and the text that can be emitted now. With a grammar, `settle` says
        whether this token completes the answer.

        Returns None if it is not known yet which tokens the grammar allows: call again with the same logits.

        Shapes:  logits (V,) float32
        Raises:  RequestError if the grammar cannot be followed any further
        """
        forbidden = None
        if self._constraint is not None and (forbidden := self._constraint.forbidden()) is None:
            return None
        token_id = self._sampler.sample(logits, forbidden)
        self.generated.append(token_id)
        if self._recording is not None:
            self._recording.note(token_id, logits)
        text, stopped = "", True
        if token_id not in self._ends:
            text, stopped = self._emittable(self._detokenizer.add(token_id))
            if self._constraint is not None and not stopped:
                self._constraint.take(token_id)
                self.is_pending = True
                self.num_shown += len(text)
                return token_id, text
        self.num_shown += len(text)
        return token_id, text + self._after_token(stopped)

    def settle(self, *, waits: bool) -> str | None:
        """
        Find out whether the last token completes the answer. Returns the text that can be emitted now.

        Returns None if that is not known yet; if it `waits`, after some milliseconds.

        Raises:  RequestError if the grammar cannot be followed any further
        """
        if self._constraint is None or (state := self._constraint.state(waits=waits)) is GrammarState.PENDING:
            return None
        self.is_pending = False
        return self._after_token(state is GrammarState.ENDED)

    def _after_token(self, stopped: bool) -> str:
        """Decide whether the choice has finished. Returns the text that was held back, if so."""
        if stopped:
            self.finish_reason = FinishReason.STOP
        elif len(self.generated) >= self._max_tokens:
            self.finish_reason = FinishReason.LENGTH
        held = "" if self.finish_reason is None else self.stops.flush()
        self.num_shown += len(held)
        return held

    def _emittable(self, text: str) -> tuple[str, bool]:
        self.num_decoded += len(text)
        if len(self.generated) <= self._sampling.min_tokens:  # stop strings are ignored
            return text, False
        return self.stops.add(text)
