"""A tokenized prompt, its sharing mode, and the report of where its KV came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from delta_tree import Span, TokenIds
from kvshare.reasons import Reason

if TYPE_CHECKING:
    from vector_index import PromptText  # vLLM imports this module too, and has no index


class SharingMode(StrEnum):
    """The kind of KV that a request may share: none, equal prefixes, or also approximate KV."""

    OFF = "off"
    EXACT = "exact"
    APPROX = "approx"

    @classmethod
    def least(cls, *modes: str) -> SharingMode:
        return next(mode for mode in cls if mode in modes)


class Decision(StrEnum):
    """The kind of KV that a prompt shared: approximate, an equal prefix, or none (all was computed)."""

    APPROX = "approx"
    EXACT = "exact"
    FULL = "full"


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A tokenized prompt, and its text for the embedder, which is never logged."""

    token_ids: TokenIds  # (T,) int32
    text: PromptText
    media: tuple[Span, ...] = ()  # tokens that stand for an image each: copied as a whole, or not at all

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(slots=True, eq=False)
class StoredPrompt:
    """
    The node of a request's prompt, known some time after the answer. Outlives the request and holds no
    tokens.

    `node` may be an earlier prompt that begins with all of this one. It may have been evicted since.
    """

    node: int | None = None
    is_settled: bool = False  # `node` is final
    deviation: float | None = None  # of the answer, in nats, if it was computed once more in full


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted deviation of an answer from that of a full prefill: KL in nats, before the prefill."""

    expected: float  # mean over such plans, including what their donors carry
    bound: float  # what an answer exceeds with at most the risk that is allowed
    inherited: float  # expected of the copies' donors
    limit: float  # of the bound: above it only equal prefixes are shared
    rule: str  # of repair: windows, attention, or none if all copies have their donors' context
    repaired: int  # tokens

    @property
    def keeps_limit(self) -> bool:
        """True if such answers exceed the limit with no more than the allowed risk."""
        return self.bound <= self.limit


@dataclass(frozen=True, slots=True)
class SharingReport:
    """The sources of the prompt's KV. exact + copied + recomputed + repaired == prompt tokens."""

    num_exact: int  # equal prefix, reused as it was
    num_copied: int  # equal tokens with another context, copied
    num_recomputed: int  # tokens that no donor had
    num_repaired: int  # tokens that a donor had, computed again because their context changed
    decision: Decision
    reason: Reason | None = None  # why no more was shared
    donors: tuple[int, ...] = ()  # node ids: for admins only
    prediction: Prediction | None = None  # for the approximate plan, used or refused
    first_difference: int | None = None  # first position that is computed; None for several prompts together
    saved_s: float = field(default=0.0, compare=False)  # by the plan's estimate, before what its lookup took

    @property
    def num_missed(self) -> int:
        return self.num_recomputed + self.num_repaired

    @property
    def num_cached(self) -> int:
        return self.num_exact + self.num_copied

    @property
    def num_prompt_tokens(self) -> int:
        return self.num_exact + self.num_copied + self.num_recomputed + self.num_repaired
