"""
A running fleet in front of fake vLLMs, without the proxy's HTTP: requests are planned and sent as the relay
does it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from delta_tree import Node, token_ids
from kvshare.errors import UpstreamError
from kvshare.fleet.engine import VllmEngine
from kvshare.fleet.remote_tier import ReplicaMemory
from kvshare.fleet.replica import Replica
from kvshare.fleet.routed_request import Incoming, RoutedRequest
from kvshare.fleet.watcher import Watcher
from kvshare.namespace import Owner
from kvshare.requests import Prompt, SharingMode
from kvshare.settings import load_settings
from kvshare.telemetry import Counts
from tests.fake_vllm import FakeVllm
from tests.kvshare.fleet.real_control import RealControl
from vector_index import PromptText

OWNER = Owner("acme", "tenant")
FORM = "Report of {place}. " + " ".join(f"Paragraph {number} says the same to all." for number in range(20))
OTHER = " ".join(f"{number * number:x} is odd" for number in range(60))
SETTINGS: dict[str, object] = {
    "engine.kind": "vllm",
    "server.port": 0,
    "index.backend": "memory",
    "index.dense": False,
    "vllm.health_interval_s": 0.05,
    "vllm.journal_wait_s": 0.1,
    "vllm.connect_timeout_s": 60.0,
    "vllm.control_timeout_s": 60.0,
    # Every plan that is right is made, however fast or busy this machine is.
    "cost.min_saved_s": -3600.0,
    "cost.min_saved_fraction": 0.0,
    "cost.measure_at_start": False,
    "control.unshared_share": 0.0,
    "sharing.max_risk": 1.0,
    "index.search_timeout_s": 60.0,
}


@dataclass(eq=False)
class ServedFleet:
    """A started engine, and requests to it."""

    engine: VllmEngine

    @property
    def replicas(self) -> tuple[Replica, ...]:
        return self.engine.fleet.replicas

    @property
    def replica(self) -> Replica:
        """The only one."""
        (replica,) = self.replicas
        return replica

    @property
    def watcher(self) -> Watcher:
        """Of the only one."""
        (watcher,) = self.engine.server.watchers
        return watcher

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(self.engine.sharing.tree.nodes())

    @property
    def counts(self) -> Counts:
        return self.engine.status().counts

    def replica_of(self, vllm: FakeVllm) -> Replica:
        return next(each for each in self.replicas if each.vllm.url == vllm.url)

    def memory_of(self, vllm: FakeVllm) -> ReplicaMemory:
        return self.engine.server.runtime.keeper.tier.memories[self.replica_of(vllm).name]

    async def ask(self, text: str, **options: Any) -> RoutedRequest:
        """Send a prompt. What the replica reports of it is stored and indexed when this returns."""
        in_flight = self.engine.server.in_flight
        before = len(in_flight._by_ticket_id)
        request = await self.send(text, **options)
        await eventually(lambda: len(in_flight._by_ticket_id) <= before)
        await self.engine.settle()
        return request

    async def report(self, place: str, **options: Any) -> RoutedRequest:
        """Ask about the form that all fill in."""
        return await self.ask(FORM.format(place=place), **options)

    async def send(
        self,
        text: str,
        *,
        owner: Owner = OWNER,
        mode: SharingMode = SharingMode.APPROX,
        may_store: bool = True,
    ) -> RoutedRequest:
        """Send a prompt until a replica has answered it. Raises NoReplicaError."""
        router = self.engine.server.router
        prompt = Prompt(token_ids(list(text.encode())), PromptText("", text))
        request = RoutedRequest(Incoming(owner, prompt, mode, may_store=may_store))
        with router.controlled(request):
            tried = [await router.route(request)]
            while not await self._answered(request, tried[-1], text):
                tried.append(router.reroute(request, tried))
        return request

    async def _answered(self, request: RoutedRequest, replica: Replica, text: str) -> bool:
        """Send a request to a replica. Returns false if it did not get there."""
        body: dict[str, object] = {"model": "tiny", "prompt": text, "cache_salt": request.salt}
        if (params := request.transfer_params) is not None:
            body["kv_transfer_params"] = params
        progress = request.progress
        progress.has_failed = False
        with self.engine.server.router.sending(request, replica):
            try:
                response = await replica.vllm.send(
                    "POST", "/v1/completions", headers=replica.headers, body=json.dumps(body).encode()
                )
            except UpstreamError:
                progress.has_failed = True
                return False
            progress.has_failed = response.status >= 400
            try:
                await response.content.readany()
                if not progress.has_failed:
                    request.note_prefilled()
                await response.read()
            finally:
                response.close()
            progress.is_complete = not progress.has_failed
            return True


@asynccontextmanager
async def serving(
    store: Path | None, *replicas: FakeVllm | dict[str, str], wait: bool = True, **overrides: object
) -> AsyncIterator[ServedFleet]:
    """
    The engine, started. `wait`: until plans can be made for each replica. `overrides`: settings, with `__`
    for a dot.
    """
    configured = [entry.settings if isinstance(entry, FakeVllm) else entry for entry in replicas]
    changes = {name.replace("__", "."): value for name, value in overrides.items()}
    given: dict[str, object] = {
        "vllm.replicas": configured,
        "store.path": None if store is None else str(store),
    }
    fleet = ServedFleet(VllmEngine(load_settings(overrides={**SETTINGS, **given, **changes})))
    await fleet.engine.start()
    try:
        if wait:
            await eventually(lambda: len(fleet.engine.fleet.sharing()) == len(replicas))
        yield fleet
    finally:
        await fleet.engine.stop()


@asynccontextmanager
async def watching(
    vllm: FakeVllm, control: RealControl, store: Path | None = None, **settings: object
) -> AsyncIterator[ServedFleet]:
    """A fleet of this vLLM, with this connector."""
    row = {"url": vllm.url, "control_url": control.url, "name": "a"}
    async with serving(store, row, wait=False, **settings) as fleet:
        yield fleet


async def eventually(condition: Callable[[], bool], *, timeout_s: float = 120.0) -> None:
    """Wait until `condition` holds; fails after `timeout_s`."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "it did not come true in time"
        await asyncio.sleep(0.005)
