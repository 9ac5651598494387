"""The values that pass through a replay: a logged request, the same in tokens, and what an arm made of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from delta_tree import Span, TokenIds

Message = Mapping[str, str]  # role, content
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Asker:
    """Who asked, as far as the log tells: for "same user or cross user"."""

    user: str | None
    conversation: str

    def is_other(self, asker: Asker) -> bool | None:
        """Whether these are two users. A conversation has one; of two without names, None: nobody knows."""
        if self.user is not None and asker.user is not None:
            return self.user != asker.user
        return False if self.conversation == asker.conversation else None


def any_of(answers: Iterable[bool | None]) -> bool | None:
    """Whether one of them is true; None where that hangs on one that nobody knows."""
    told = set(answers)
    return True if True in told else None if None in told else False


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """
    One request as a server saw it; exactly one of `messages`, `prompt`, `token_ids`, `block_hashes` is given.

    Requests of a conversation come in the order of their turns; each carries its whole history, the
    assistant's answers included, as clients of chat APIs send it.
    """

    source: str  # file name, for error reports
    line: int  # of that file, from 1; a row number in Parquet
    conversation: str  # unique within the stream
    turn: int | None = None  # from 0; None: the log does not say
    user: str | None = None  # None: the log does not name users
    time_s: float | None = None  # since any epoch; None: the log does not say
    messages: tuple[Message, ...] | None = None
    prompt: str | None = None
    token_ids: tuple[int, ...] | None = None
    block_hashes: tuple[int, ...] | None = None  # Mooncake traces: one id per block of `block_size` tokens
    block_size: int = 0
    num_tokens: int | None = None  # where the log gives lengths only, or block hashes
    answer: str | None = None  # for response caches, and as the next turn's history
    num_answer_tokens: int | None = None
    language: str = "unknown"
    namespace: str = "default"  # who may share with whom: the tenant, where a log says

    @property
    def asker(self) -> Asker:
        return Asker(self.user, self.conversation)


@dataclass(frozen=True, slots=True, eq=False)
class TokenizedRequest:
    """A request as the arms see it."""

    index: int  # place in the stream, from 0
    logged: LoggedRequest
    token_ids: TokenIds  # (T,) int32: the prompt
    answer_ids: TokenIds  # (A,) int32: what was generated, as far as the log says; may be empty
    text: str  # what tells the prompt apart, for embedders; never written anywhere
    time_s: float  # never decreases over the stream

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Outcome:
    """
    What one arm would have reused of one request. Its names are columns of rows.py.

    `hits` are the prompt's positions that need no computing, ascending and disjoint. Only equal tokens count:
    a response cache's answer to another prompt is a `false_hit`.
    """

    hits: tuple[Span, ...] = ()
    num_exact: int = 0  # of the hits: equal prefix
    num_repaired: int = 0  # equal tokens that are computed again
    num_donors: int = 0
    shifts: tuple[int, ...] = ()  # of the copies, in tokens
    cross_user: bool | None = False  # some of it came from another user's prompt; None: not known
    false_hit: bool = False
    lookup_s: float = 0.0
    plan_s: float = 0.0
    num_stored_bytes: int = 0  # in the arm's store, after this request
    distance: float | None = None  # cosine distance to the nearest earlier prompt, where the arm looks
    reason: str | None = None  # why nothing or no more was shared, one of a few fixed words
    answered: bool = False  # by a response cache
    embedded: bool = False  # for the look-up
    num_refused: int = 0  # tokens a gate refused, that the arm's candidates had
    num_refused_generation: int = 0  # of these, taken if only the generation did not matter

    @property
    def num_hit(self) -> int:
        return sum(len(span) for span in self.hits)

    @property
    def num_copies(self) -> int:
        return len(self.shifts)


def batches(requests: Iterable[T], size: int) -> Iterator[list[T]]:
    """Up to `size` requests at a time: what is tokenized or embedded together."""
    remaining = iter(requests)
    while batch := list(islice(remaining, size)):
        yield batch
