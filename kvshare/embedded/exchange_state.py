"""State of the exchange of prompts with other servers: names of prompts, and why the exchange fails now."""

from __future__ import annotations

import logging

from delta_tree import NodeId
from kvshare.safe_logging import classes_and_places
from kvshare.tiers.shared_backend import BackendError

log = logging.getLogger(__name__)


class ExchangedNames:
    """The names that prompts of this server have in the store, by node, and the nodes by name."""

    def __init__(self) -> None:
        self._names: dict[NodeId, str] = {}
        self._nodes: dict[str, NodeId] = {}

    def remember(self, node_id: NodeId, name: str) -> None:
        self._names[node_id] = name
        self._nodes[name] = node_id

    def forget(self, node_id: NodeId) -> str | None:
        name = self._names.pop(node_id, None)
        if name is not None:
            self._nodes.pop(name, None)
        return name

    def node_of(self, name: str) -> NodeId | None:
        return self._nodes.get(name)

    def all(self) -> list[tuple[NodeId, str]]:
        return list(self._names.items())


class ExchangeProblem:
    """Logs once that the store is not used, and when it is again; and logs a fault once."""

    def __init__(self) -> None:
        self._reason: str | None = None
        self._fault: str | None = None

    def note(self, exc: BackendError | None) -> None:
        """Note an error of the store; None: it answered without one."""
        reason = None if exc is None else exc.strerror
        if reason is not None and self._reason is None:
            log.warning(
                "the shared store is not used: %s. This server goes on alone, and tries again; look at "
                "shared_tier.* and at the store",
                reason,
            )
        elif reason is None and self._reason is not None:
            log.warning("the shared store is used again")
        self._reason = reason

    def note_fault(self, exc: Exception | None) -> None:
        was, self._fault = self._fault, None if exc is None else classes_and_places(exc)
        if self._fault is not None and was is None:
            log.error("prompts are not exchanged; this is tried again, please report it: %s", self._fault)
