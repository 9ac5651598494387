"""
Sends entries to a running server, so many at a time, and counts what became of them.

    sent       computed by the server's ordinary route, within the namespace of the key
    stored     a node has it; `known`: it was stored before. Only the admin routes know
    pinned     stays when there is no room; refused beyond half of the memory for KV

An interrupted run has a document, too, of the entries that were finished: "complete" is false in it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from kvshare.errors import UpstreamError
from kvshare.warming.client import Sent, WarmClient, connected
from kvshare.warming.entries import Entry, Place, Unreadable

Report = Callable[[int], None]  # entries finished so far


@dataclass(frozen=True, slots=True)
class WarmOptions:
    """Where to, as whom, and how. `admin_url` None: the same address; `admin_key` None: the same key."""

    url: str
    key: str | None = None
    admin_url: str | None = None
    admin_key: str | None = None
    pin: bool = False
    concurrency: int = 4


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one entry. `node` None: not stored, or not known. `reason`: why it failed."""

    place: Place
    sent: Sent
    node: int | None = None
    pinned: bool = False
    reason: str | None = None


def warm(
    entries: Iterable[Entry | Unreadable], options: WarmOptions, report: Report = lambda done: None
) -> dict[str, Any]:
    """
    Send the entries; returns the document. Ctrl-C ends it early; it is raised only where nothing is finished.

    Raises:  UnreachableError if no server answers; UpstreamError if that is no server of models, or this key
             may not pin; LogError for a file that cannot be opened
    """
    run = _Run(options, report)
    began, complete = time.perf_counter(), True
    try:
        asyncio.run(run.send_all(entries))
    except KeyboardInterrupt:
        if not run.outcomes:
            raise
        complete = False
    return run.document(complete=complete, seconds=time.perf_counter() - began)


class _Run:
    """One run over all entries; adds an outcome as each is finished."""

    def __init__(self, options: WarmOptions, report: Report) -> None:
        self.outcomes: dict[int, Outcome] = {}  # by the entries' order
        self._options = options
        self._report = report
        self._is_admin = False  # whether the admin routes say what was stored
        self._num_evicted = 0  # of what this run stored, when it was over

    async def send_all(self, entries: Iterable[Entry | Unreadable]) -> None:
        chosen = self._options
        admin_key = chosen.admin_key or chosen.key
        async with connected(
            chosen.url, key=chosen.key, admin_url=chosen.admin_url, admin_key=admin_key
        ) as client:
            model = await client.model()
            self._is_admin = await client.may_ask_admin()
            if chosen.pin and not self._is_admin:
                raise UpstreamError(
                    "--pin: the admin routes refused this key, or are not there. Give an admin key with "
                    "--admin-key or KVSHARE_ADMIN_KEY, and --admin-url where server.admin_port is set"
                )
            numbered = enumerate(entries)  # each worker takes the next
            await asyncio.gather(*(self._work(client, model, numbered) for _ in range(chosen.concurrency)))
            await self._count_evicted(client)

    async def _work(
        self, client: WarmClient, model: str, numbered: Iterator[tuple[int, Entry | Unreadable]]
    ) -> None:
        for number, entry in numbered:
            if isinstance(entry, Unreadable):
                outcome = Outcome(entry.place, Sent(), reason=entry.reason)
            else:
                sent = await client.send(entry.path, {"model": model, **entry.body})
                outcome = await self._outcome(client, entry.place, sent)
            self.outcomes[number] = outcome
            self._report(len(self.outcomes))

    async def _outcome(self, client: WarmClient, place: Place, sent: Sent) -> Outcome:
        if sent.error is not None or sent.reason == "short_prompt":
            return Outcome(place, sent, reason=sent.error or sent.reason)
        if not self._is_admin or sent.request_id is None:
            return Outcome(place, sent)
        node = await client.stored_as(sent.request_id)
        if node is None:
            return Outcome(place, sent, reason="not_stored")
        refused = await client.pin(node) if self._options.pin else None
        return Outcome(place, sent, node, self._options.pin and refused is None, refused)

    async def _count_evicted(self, client: WarmClient) -> None:
        """One after the other: the server's writer answers this, between what it stores."""
        nodes = {outcome.node for outcome in self.outcomes.values() if outcome.node is not None}
        for node in nodes:
            self._num_evicted += not await client.is_there(node)

    def document(self, *, complete: bool, seconds: float) -> dict[str, Any]:
        """JSON-ready. Tokens are of prompts that were answered; null is what only an admin key may ask."""
        ordered = [outcome for _, outcome in sorted(self.outcomes.items())]
        answered = [outcome for outcome in ordered if outcome.sent.error is None and outcome.sent.num_tokens]
        stored = [outcome for outcome in answered if outcome.node is not None]
        failures = [outcome for outcome in ordered if outcome.reason is not None]
        return {
            "complete": complete,
            "entries": len(ordered),
            "tokens": sum(outcome.sent.num_tokens for outcome in answered),
            "computed": sum(outcome.sent.num_computed for outcome in answered),
            "exact": sum(outcome.sent.num_exact for outcome in answered),
            "copied": sum(outcome.sent.num_copied for outcome in answered),
            "stored": sum(not outcome.sent.is_known for outcome in stored) if self._is_admin else None,
            "known": sum(outcome.sent.is_known for outcome in answered),
            "evicted": self._num_evicted if self._is_admin else None,
            "pinned": sum(outcome.pinned for outcome in stored),
            "failed": len(failures),
            "seconds": seconds,
            "failures": [{**asdict(outcome.place), "reason": outcome.reason} for outcome in failures],
            "prompts": [_prompt(outcome) for outcome in answered],
        }


def _prompt(outcome: Outcome) -> dict[str, Any]:
    tokens = outcome.sent.num_tokens
    return {**asdict(outcome.place), "tokens": tokens, "node": outcome.node, "pinned": outcome.pinned}
