"""A tokenized prompt, how much of others it may share, and where its KV came from."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from delta_tree import TokenIds
from kvshare.reasons import Reason

if TYPE_CHECKING:
    from vector_index import PromptText  # plans are made with this file inside vLLM, too, which has no index


class SharingMode(StrEnum):
    """How much of other prompts a request accepts: nothing, equal prefixes, or edited KV as well."""

    OFF = "off"
    EXACT = "exact"
    APPROX = "approx"


class Decision(StrEnum):
    """What a prompt shared: edited KV, an equal prefix, or nothing, so that all of it was computed."""

    APPROX = "approx"
    EXACT = "exact"
    FULL = "full"


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A tokenized prompt and the text that tells it apart (only for the embedder, never logged)."""

    token_ids: TokenIds  # (T,) int32
    text: PromptText

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(slots=True, eq=False)
class StoredPrompt:
    """
    What a prompt was stored as, which comes after its answer. Outlives the request and holds no token of it.

    `node` may also be an earlier prompt that begins with all of this one, and may have been evicted since.
    """

    node: int | None = None
    is_settled: bool = False  # nothing more will be stored of it


@dataclass(frozen=True, slots=True)
class Prediction:
    """How far an answer is expected to be from the full prefill's, before anything is computed. KL, nats."""

    expected: float  # of the plan, with what its donors' KV is off already
    inherited: float  # of it, the donors'
    limit: float  # beyond it nothing but equal prefixes is shared
    rule: str  # of repair: windows, attention; none where nothing is new in front of any copy
    repaired: int  # tokens


@dataclass(frozen=True, slots=True)
class SharingReport:
    """Where the prompt's KV came from. exact + copied + recomputed + repaired == prompt tokens."""

    num_exact: int  # equal prefix, reused as it was
    num_copied: int  # equal tokens of another context, laid into place
    num_recomputed: int  # tokens nobody had
    num_repaired: int  # tokens somebody had, computed again because their context changed
    decision: Decision
    reason: Reason | None = None  # why not more was shared
    donors: tuple[int, ...] = ()  # node ids: for admins only
    prediction: Prediction | None = None  # of what is approximate, used or refused
    first_difference: int | None = None  # first position that is computed; None for several prompts together

    @property
    def num_missed(self) -> int:
        """Prompt tokens that were computed."""
        return self.num_recomputed + self.num_repaired

    @property
    def num_cached(self) -> int:
        """Prompt tokens that were not computed."""
        return self.num_exact + self.num_copied

    @property
    def num_prompt_tokens(self) -> int:
        return self.num_exact + self.num_copied + self.num_recomputed + self.num_repaired
