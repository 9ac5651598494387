"""What administrators ask and command of an engine, over a real tree of two prompts."""

from __future__ import annotations

from itertools import count
from typing import TypeVar

from delta_tree import DeltaTree, NodeId
from kvshare.admin import (
    Command,
    CommandResult,
    DiffDocument,
    DiffQuestion,
    EvictionDocument,
    NodeDocument,
    NodeQuestion,
    PinDocument,
    ServerStats,
    StatsQuestion,
    StoreQuestion,
    TreeDocument,
    TreeQuestion,
)
from kvshare.engine import Engine
from kvshare.sharing.cost import CostModel
from kvshare.sharing.rates import MinSaved, Rates
from tests.delta_tree.fake_prompts import fresh_draft

_T = TypeVar("_T")


class SmallStore(Engine):
    """Has the prompts 1 and 2. `asked`: what reached the engine, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[object] = []
        ids = count(1)
        self._tree = DeltaTree.open(None, identity="small", new_id=lambda: NodeId(next(ids)))
        for tokens in (range(100), range(50, 150)):
            self._tree.insert(fresh_draft(list(tokens)))

    async def stats(self, question: StatsQuestion) -> ServerStats:
        costs = CostModel(
            Rates.linear(1000.0, 1e9),
        ).document(MinSaved())
        return {
            **self._answer(question),
            "costs": costs,
            "control": {"unshared_share": 0.02, "num_requests": {}, "changes": {}, "loads": []},
            "pins": {"num_bytes": 0, "max_bytes": 0},
            "tiers": [],
        }

    async def tree(self, question: TreeQuestion) -> TreeDocument:
        return self._answer(question)

    async def node(self, question: NodeQuestion) -> NodeDocument:
        return self._answer(question)

    async def diff(self, question: DiffQuestion) -> DiffDocument:
        return self._answer(question)

    async def execute(self, command: Command) -> EvictionDocument | PinDocument:
        self.asked.append(command)
        result: CommandResult[EvictionDocument] | CommandResult[PinDocument] = command.apply(self._tree)
        return result.document

    def _answer(self, question: StoreQuestion[_T]) -> _T:
        self.asked.append(question)
        return question.answer(self._tree)
