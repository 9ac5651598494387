"""A logged request, which a row of a log becomes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

Message = Mapping[str, str]  # role, content


@dataclass(frozen=True, slots=True)
class Requester:
    """The user and the conversation of a request: did reused tokens come from another user?"""

    user: str | None
    conversation: str

    def is_other(self, requester: Self) -> bool | None:
        """Return whether these are two users; None: the log lacks a name. A conversation has one user."""
        if self.user is not None and requester.user is not None:
            return self.user != requester.user
        return False if self.conversation == requester.conversation else None


def any_of(answers: Iterable[bool | None]) -> bool | None:
    """Return whether one of them is true; None where that depends on an unknown one."""
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
