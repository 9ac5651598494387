"""Answers to questions and commands by the name of their route, with arguments as a client writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from delta_tree import DeltaTree
from kvshare.admin import DiffQuestion, Evict, NodeQuestion, Pin, StatsQuestion, TreeQuestion, Unpin, checked

QUESTIONS = {"stats": StatsQuestion, "tree": TreeQuestion, "node": NodeQuestion, "diff": DiffQuestion}
COMMANDS = {"evict": Evict, "pin": Pin, "unpin": Unpin}


def document_of(tree: DeltaTree, what: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    if what in QUESTIONS:
        return dict(checked(QUESTIONS[what], arguments).answer(tree))
    return dict(checked(COMMANDS[what], arguments).apply(tree).document)
