"""One of the n completions of a request: samples tokens, turns them into text, and decides when it ends."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer

from kvshare.engines.base import FinishReason, GenerationRequest
from kvshare.engines.embedded.decoder import RunningSequence
from kvshare.engines.embedded.grammar import Constraint
from kvshare.engines.embedded.sampling import Draw, Sampler
from kvshare.engines.embedded.text import Detokenizer, StopMatcher


@dataclass(frozen=True, slots=True)
class Decoding:
    """The settings that all choices of a request have in common."""

    tokenizer: Tokenizer
    draw: Draw
    eos_token_ids: frozenset[int]
    max_tokens: int
    constraint: Constraint | None = None  # in its first state

    def choice(self, request: GenerationRequest, index: int, kv: RunningSequence) -> Choice:
        """A choice that has no token yet."""
        sampling = request.sampling
        stops = frozenset(sampling.stop_token_ids)
        return Choice(
            index=index,
            kv=kv,
            sampler=Sampler(
                sampling,
                self.draw,
                choice=index,
                prompt=request.prompt.token_ids,
                ends=stops | self.eos_token_ids,
            ),
            detokenizer=Detokenizer(self.tokenizer, skip_special_tokens=sampling.skip_special_tokens),
            stops=StopMatcher(sampling.stop),
            constraint=None if self.constraint is None else self.constraint.fork(),
            ends=stops if sampling.ignore_eos else stops | self.eos_token_ids,
            min_tokens=sampling.min_tokens,
            max_tokens=self.max_tokens,
        )


@dataclass(slots=True)
class Choice:
    """The state of one choice: its tokens so far, and why it ended."""

    index: int
    kv: RunningSequence
    sampler: Sampler
    detokenizer: Detokenizer
    stops: StopMatcher
    constraint: Constraint | None
    ends: frozenset[int]  # tokens that end the choice and are not part of its text
    min_tokens: int  # in the first so many tokens stop strings are ignored
    max_tokens: int
    generated: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def take(self, logits: torch.Tensor) -> tuple[int, str]:
        """
        Sample the next token. Returns it and the text that can be emitted now.

        Shapes:  logits (V,) float32
        """
        token_id = self.sampler.sample(
            logits, None if self.constraint is None else self.constraint.forbidden()
        )
        self.generated.append(token_id)
        text, stopped = "", True
        if token_id not in self.ends:
            text, stopped = self._emittable(self.detokenizer.add(token_id))
            if self.constraint is not None and not stopped:
                stopped = self.constraint.take(token_id)
        if stopped:
            self.finish_reason = FinishReason.STOP
        elif len(self.generated) >= self.max_tokens:
            self.finish_reason = FinishReason.LENGTH
        if self.finish_reason is not None:
            text += self.stops.flush()
        return token_id, text

    def _emittable(self, text: str) -> tuple[str, bool]:
        """The part of new text that can be emitted, and whether a stop string ends it."""
        if len(self.generated) <= self.min_tokens:
            return text, False
        return self.stops.add(text)
