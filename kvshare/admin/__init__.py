"""
Administrators' queries and commands, on the store of a running server or the metadata of a stopped one.

    questions.py   how much is stored, how prompts hang together, what differs between two
    commands.py    evict, pin, unpin
    documents.py   the JSON-ready answers to both; entries.py: of a prompt, its edits and its pieces
    arguments.py   their arguments, checked, from a query string or JSON
"""

from kvshare.admin.arguments import checked
from kvshare.admin.commands import Command, CommandResult, Evict, Pin, Unpin
from kvshare.admin.documents import (
    ControlDocument,
    Costs,
    DiffDocument,
    EvictionDocument,
    NodeDocument,
    PinDocument,
    PinnedBytes,
    ServerStats,
    StoreStats,
    TierDocument,
    TreeDocument,
)
from kvshare.admin.questions import DiffQuestion, NodeQuestion, StatsQuestion, StoreQuestion, TreeQuestion

__all__ = [
    "Command",
    "CommandResult",
    "ControlDocument",
    "Costs",
    "DiffDocument",
    "DiffQuestion",
    "Evict",
    "EvictionDocument",
    "NodeDocument",
    "NodeQuestion",
    "Pin",
    "PinDocument",
    "PinnedBytes",
    "ServerStats",
    "StatsQuestion",
    "StoreQuestion",
    "StoreStats",
    "TierDocument",
    "TreeDocument",
    "TreeQuestion",
    "Unpin",
    "checked",
]
