"""What replicas report of requests, and a keeper that stores it."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from delta_tree import (
    Node,
    NodeId,
    TokenIds,
    new_segment_id,
    token_ids,
)
from kvshare.fleet.replica_keeper import ReplicaKeeper
from kvshare.fleet.routed_request import Execution, Incoming, Routed, RoutedRequest
from kvshare.namespace import Owner
from kvshare.requests import Prompt
from kvshare.vllm_protocol.messages import FinishedReport, StoredSegment, Ticket
from vector_index import PromptText


def prompt(seed: int, length: int = 50) -> TokenIds:
    return token_ids(np.random.default_rng(seed).integers(1, 1000, length).astype(np.int32))


def whole(length: int = 50) -> FinishedReport:
    stored = StoredSegment(new_segment_id(), 0, length, 10 * length)
    return FinishedReport("r", "full", None, stored=(stored,))


def request(tokens: TokenIds, *, replica: str = "a", namespace: str | None = None) -> RoutedRequest:
    """One that was sent to a replica without a plan; each replica has namespaces of its own."""
    prompt = Prompt(tokens, PromptText("", ""))
    ticket = Ticket("r", namespace or replica, "d", len(tokens))
    incoming = Incoming(Owner("acme", "tenant"), prompt)
    return RoutedRequest(incoming, Routed(ticket=ticket), execution=Execution(replica))


def offer(
    keeper: ReplicaKeeper,
    finished: FinishedReport,
    tokens: TokenIds,
    *,
    replica: str = "a",
    namespace: str | None = None,
    max_bytes: int = 10**6,
    held: Collection[NodeId] = (),
) -> Node | None:
    """A replica has retained this of a prompt."""
    keeper.tier.memories[replica].max_bytes = max_bytes
    return keeper.store(request(tokens, replica=replica, namespace=namespace), finished, held)
