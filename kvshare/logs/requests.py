"""What passes through a replay: a logged request, the same in tokens, and what a policy reused of it."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Self, TypeVar

from delta_tree import Span, TokenIds

Message = Mapping[str, str]  # role, content
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Requester:
    """The user and the conversation of a request: did reused tokens come from another user?"""

    user: str | None
    conversation: str

    def is_other(self, requester: Self) -> bool | None:
        """Whether these are two users; None: the log does not name both. A conversation has one user."""
        if self.user is not None and requester.user is not None:
            return self.user != requester.user
        return False if self.conversation == requester.conversation else None


def any_of(answers: Iterable[bool | None]) -> bool | None:
    """Whether one of them is true; None where that depends on an unknown one."""
    found = set(answers)
    return True if True in found else None if None in found else False


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """
    One request as a server saw it; it has one of `messages`, `prompt`, `token_ids`, `block_hashes`.

    Requests of a conversation come in the order of their turns. Each has its whole history with the
    assistant's answers, as clients of chat APIs send it.
    """

    source: str  # name of the file
    line: int  # from 1; in Parquet the number of the row
    conversation: str  # unique within the stream
    turn: int | None = None  # from 0; None: the log does not say
    user: str | None = None  # None: the log does not name users
    time_s: float | None = None  # since any epoch; None: the log does not say
    messages: tuple[Message, ...] | None = None
    prompt: str | None = None
    token_ids: tuple[int, ...] | None = None
    block_hashes: tuple[int, ...] | None = None  # Mooncake traces: one id per block of `block_size` tokens
    block_size: int = 0
    num_tokens: int | None = None  # with `block_hashes`: of the prompt
    answer: str | None = None  # for response caches, and as the next turn's history
    language: str = "unknown"
    namespace: str = "default"  # requests share only within it: the tenant, where a log names one

    @property
    def requester(self) -> Requester:
        return Requester(self.user, self.conversation)


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
    What one policy would have reused of one request; its names are columns of `requests.parquet`.

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
