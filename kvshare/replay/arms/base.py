"""
What an arm is: one way of caching, asked in turn what it would have reused of each request.

An arm knows only what it has observed before. It never shares over namespaces, and it never tells tokens or
text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from delta_tree import TokenIds, token_ids
from kvshare.replay.arms.meanings import Meanings
from kvshare.replay.requests import Outcome, TokenizedRequest
from kvshare.replay.results import arm_label
from kvshare.settings import Settings

T = TypeVar("T", bound=np.generic)


@dataclass(frozen=True, slots=True)
class Workbench:
    """What all arms of a replay are made with."""

    settings: Settings
    bytes_per_token: int
    prefill_tokens_per_s: float
    seed: int = 0
    meanings: Meanings | None = None  # None: no arm may look at meaning
    light_ids: frozenset[int] = field(default_factory=frozenset)  # tokens without a letter or digit
    explain_losses: bool = True  # plan again to tell what KVShare's gates cost; no part of serving


class Arm(ABC):
    """
    One way of caching with one store. `capacity_tokens` None: the store is infinite.

    Arms live in one thread and are closed once.
    """

    family = ""

    def __init__(self, name: str, bench: Workbench, capacity_tokens: int | None = None) -> None:
        self.name = name
        self.bench = bench
        self.capacity_tokens = capacity_tokens

    @property
    def label(self) -> str:
        """How results and reports call it."""
        return arm_label(self.name, self.capacity_tokens)

    @abstractmethod
    def observe(self, request: TokenizedRequest) -> Outcome:
        """What of a request would be reused, given all that was observed before; then store it."""

    @property
    def options(self) -> dict[str, Any]:
        """What distinguishes this arm from others of its family, for `results.json`."""
        return {}

    def describe_tree(self) -> dict[str, Any] | None:
        """Figures of the delta tree, for arms that have one; see results.py."""
        return None

    def close(self) -> None:  # noqa: B027  most arms hold nothing but memory
        """Let go of everything."""


class NothingArm(Arm):
    """No cache at all: what the others are compared with."""

    family = "nothing"

    def observe(self, request: TokenizedRequest) -> Outcome:
        return Outcome()


def stored_tokens(request: TokenizedRequest) -> TokenIds:
    """The tokens whose KV there is once a request was answered: the prompt and what was generated."""
    return token_ids(np.concatenate([request.token_ids, request.answer_ids]))


def with_room(rows: NDArray[T], num_rows: int) -> NDArray[T]:
    """The same array, or one at least twice as long that begins with it and goes on with zeros."""
    if num_rows <= len(rows):
        return rows
    more = max(len(rows), num_rows - len(rows))
    return np.concatenate([rows, np.zeros((more, *rows.shape[1:]), rows.dtype)])
