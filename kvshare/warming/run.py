"""
Sends entries to a running server, so many at a time, and counts what became of them.

    sent       computed by the server's ordinary route, within the namespace of the key
    stored     a node has it; `known`: it was stored before. Only the admin routes know
    pinned     stays when there is no room; refused beyond half of the memory for KV

An interrupted run has a document, too, of the entries that were finished: "complete" is false in it.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any

from kvshare.errors import UpstreamError
from kvshare.warming.client import WarmClient, WarmingOutcome, WarmOptions, connected
from kvshare.warming.entries import WarmingEntry

Report = Callable[[int], None]  # entries finished so far


def warm(
    entries: Iterable[WarmingEntry], options: WarmOptions, report: Report = lambda done: None
) -> dict[str, Any]:
    """
    Send the entries; returns the document. Ctrl-C ends it early; it is raised only where nothing is finished.

    Raises:  UnreachableError if no server answers; UpstreamError if that is not a server of models, or this
             key may not pin; LogError for a file that cannot be opened
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
        self.outcomes: dict[int, WarmingOutcome] = {}  # by the entries' order
        self._options = options
        self._report = report
        self._is_admin = False  # whether the admin routes say what was stored
        self._num_evicted = 0  # of what this run stored, when it was over

    async def send_all(self, entries: Iterable[WarmingEntry]) -> None:
        async with connected(self._options) as client:
            self._is_admin = await client.may_ask_admin()
            if self._options.pin and not self._is_admin:
                raise UpstreamError(
                    "--pin: the admin routes refused this key, or are not there. Give an admin key with "
                    "--admin-key or KVSHARE_ADMIN_KEY, and --admin-url where server.admin_port is set"
                )
            numbered = enumerate(entries)  # each worker takes the next
            workers = range(self._options.concurrency)
            await asyncio.gather(*(self._work(client, numbered) for _ in workers))
            # One after the other: the server's writer answers this, between what it stores.
            for node in {outcome.node for outcome in self.outcomes.values() if outcome.node is not None}:
                self._num_evicted += not await client.is_there(node)

    async def _work(self, client: WarmClient, numbered: Iterator[tuple[int, WarmingEntry]]) -> None:
        for number, entry in numbered:
            self.outcomes[number] = await self._outcome(client, entry)
            self._report(len(self.outcomes))

    async def _outcome(self, client: WarmClient, entry: WarmingEntry) -> WarmingOutcome:
        if entry.reason is not None:
            return WarmingOutcome(entry.place, reason=entry.reason)
        sent = await client.send(entry)
        if sent.reason is not None or sent.request_id is None or not self._is_admin:
            return sent
        node = await client.stored_as(sent.request_id)
        if node is None:
            return replace(sent, reason="not_stored")
        refused = await client.pin(node) if self._options.pin else None
        return replace(sent, node=node, pinned=self._options.pin and refused is None, reason=refused)

    def document(self, *, complete: bool, seconds: float) -> dict[str, Any]:
        """JSON-ready. Tokens are of prompts that were answered; null is what only an admin key may ask."""
        ordered = [outcome for _, outcome in sorted(self.outcomes.items())]
        answered = [outcome for outcome in ordered if outcome.num_tokens]
        stored = [outcome for outcome in answered if outcome.node is not None]
        failures = [outcome for outcome in ordered if outcome.reason is not None]
        return {
            "complete": complete,
            "entries": len(ordered),
            "tokens": sum(outcome.num_tokens for outcome in answered),
            "computed": sum(outcome.num_computed for outcome in answered),
            "exact": sum(outcome.num_exact for outcome in answered),
            "copied": sum(outcome.num_copied for outcome in answered),
            "stored": sum(not outcome.is_known for outcome in stored) if self._is_admin else None,
            "known": sum(outcome.is_known for outcome in answered),
            "evicted": self._num_evicted if self._is_admin else None,
            "pinned": sum(outcome.pinned for outcome in stored),
            "failed": len(failures),
            "seconds": seconds,
            "failures": [{**asdict(outcome.place), "reason": outcome.reason} for outcome in failures],
            "prompts": [
                {**asdict(one.place), "tokens": one.num_tokens, "node": one.node, "pinned": one.pinned}
                for one in answered
            ],
        }
