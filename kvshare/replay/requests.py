"""A logged request in tokens, and what a policy reused of it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from delta_tree import Span, TokenIds
from kvshare.logs.requests import LoggedRequest

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class TokenizedRequest:
    """A request as policies see it."""

    index: int  # place in the stream, from 0
    logged: LoggedRequest
    token_ids: TokenIds  # (T,) int32: the prompt
    answer_ids: TokenIds  # (A,) int32: what was generated, as far as the log says; may be empty
    text: str  # what embedders read of the prompt; never written to a file
    time_s: float  # never decreases over the stream

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Outcome:
    """
    The tokens that one policy would have reused of one request, mostly columns of `requests.parquet`.

    `hits` are the positions of the prompt that need no computing, ascending and disjoint. Only equal tokens
    count: a response cache's answer to another prompt is a `false_hit`.
    """

    hits: tuple[Span, ...] = ()
    num_exact: int = 0  # of the hits: equal prefix
    num_repaired: int = 0  # equal tokens that are computed again
    num_donors: int = 0
    shifts: tuple[int, ...] = ()  # of the copies, in tokens
    cross_user: bool | None = False  # some of it came from another user's prompt; None: unknown
    false_hit: bool = False
    lookup_s: float = 0.0
    plan_s: float = 0.0
    num_stored_bytes: int = 0  # in the policy's store, after this request
    distance: float | None = None  # cosine, to the nearest earlier prompt; None: not searched for
    reason: str | None = None  # why nothing or no more was shared: a fixed word
    answered: bool = False  # by a response cache
    embedded: bool = False  # for the look-up, whose time excludes it
    num_refused: int = 0  # tokens that the candidates had and a threshold rejected
    num_refused_generation: int = 0  # of these: rejected only for their generation
    num_from_disk: int = 0  # of the hits; only where there are tiers, and in no column
    num_exact_from_disk: int = 0  # of these: equal prefix

    @property
    def num_hit(self) -> int:
        return sum(len(span) for span in self.hits)

    @property
    def num_copies(self) -> int:
        return len(self.shifts)


def batches(requests: Iterable[T], size: int) -> Iterator[list[T]]:
    """Up to `size` requests at a time, to be tokenized or embedded together."""
    remaining = iter(requests)
    while batch := list(islice(remaining, size)):
        yield batch
