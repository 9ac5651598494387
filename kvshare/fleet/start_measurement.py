"""
Measures at start what prefills, passes and loads cost at a replica, where no earlier run has kept it.

For each of three lengths the proxy sends a prompt of random tokens, and then the same with some tokens
changed: its copies are loaded and the changed tokens computed in a pass, as with every plan. It sends one
request at a time, and only while the replica has no other: a client waits for one of them at most.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection

import numpy as np

from delta_tree import Copy, NodeId, Span, TokenIds, gaps, token_ids
from kvshare.errors import UpstreamError
from kvshare.fleet.observation import observe
from kvshare.fleet.own_requests import OwnAnswer, OwnRequests
from kvshare.fleet.replica import Fleet, Replica
from kvshare.fleet.replica_keeper import ReplicaKeeper
from kvshare.runtime import Runtime
from kvshare.sharing.cost import LOAD, PASS, PREFILL
from kvshare.sharing.kept_costs import Fingerprint
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.sharing.rates import Estimate
from kvshare.vllm_protocol.messages import FinishedReport, StoredSegment
from kvshare.vllm_protocol.replica_info import ReplicaInfo

log = logging.getLogger(__name__)

_LENGTHS = (256, 2048, 1 << 20)  # tokens; the last one is what a step can compute
_STEP_TOKENS = 8192  # of a connector that does not say
_SHORTEST = 128  # tokens; in a shorter context nothing is measured
_EDITS, _EDIT_TOKENS = 4, 16
_LONG_S = 1.0  # after a prefill that took so long no longer one is sent
_TRIES = 3  # for a prefill that was not alone
_QUIET_S, _POLL_S = 0.25, 0.05  # how long a replica must have had no request
_PATIENCE_S = 600.0
_TOKENS = (3, 128)  # the range of ids; any vocabulary has them
_DONOR = NodeId(0)  # is in no tree


def fingerprint_of(info: ReplicaInfo) -> Fingerprint:
    """Return the conditions that the costs of a replica depend on."""
    fields, settings = info.namespace_fields, sorted(info.settings.items())
    return Fingerprint(
        machine=info.device or "a device that the connector does not name",
        model=", ".join([fields["model"], fields["dtype"], fields["kv_layout"], info.fingerprint]),
        versions=", ".join(f"{name} {value}" for name, value in [*sorted(info.versions.items()), *settings]),
    )


class _BusyError(Exception):
    """No replica was idle for long."""


class StartMeasurement:
    """Begins when a replica with unknown costs is connected: `want`."""

    def __init__(self, runtime: Runtime[ReplicaKeeper], fleet: Fleet, *, is_on: bool) -> None:
        self.own_requests = OwnRequests()
        self._runtime = runtime
        self._cost = runtime.sharing.cost
        self._fleet = fleet
        self._is_on = is_on and self._cost.is_learning
        self._is_wanted = asyncio.Event()
        self._random = np.random.default_rng()
        self._num_sent = 0

    def want(self) -> None:
        if self._is_on and not self._is_known:
            self._is_wanted.set()

    async def run(self) -> None:
        """Until cancelled. Where it fails, costs are learned from requests."""
        while True:
            await self._is_wanted.wait()
            self._is_wanted.clear()
            try:
                replica = await self._idle(self._fleet.replicas)
                if not self._is_known:  # by requests meanwhile
                    await self._measure(replica)
            except _BusyError:
                if not self._is_known:
                    log.info("costs are learned from requests: no replica was idle for %g s", _PATIENCE_S)
            except (TimeoutError, UpstreamError) as exc:
                problem = str(exc) or type(exc).__name__
                log.warning("costs could not be measured, they are learned from requests: %s", problem)

    @property
    def _is_known(self) -> bool:
        return {PREFILL, PASS, LOAD} <= self._cost.measured

    async def _idle(self, replicas: Collection[Replica]) -> Replica:
        """Return one of them that has had no request for a while. Raises _BusyError."""
        quiet_since: dict[Replica, float] = {}
        until = time.monotonic() + _PATIENCE_S
        while (now := time.monotonic()) < until:
            for replica in replicas:
                if not replica.shares or replica.requests:
                    quiet_since.pop(replica, None)
                elif now - quiet_since.setdefault(replica, now) >= _QUIET_S:
                    return replica
            await asyncio.sleep(_POLL_S)
        raise _BusyError

    async def _measure(self, replica: Replica) -> None:
        began, self._num_sent = time.monotonic(), 0
        info = await replica.control.info()  # as it is now
        lengths = lengths_for(info)
        if lengths:
            await self._send(replica, self._tokens(lengths[0]), NoPlan())  # with cold caches: not counted
        for length in lengths:
            if await self._measure_length(replica, length, info) > _LONG_S:
                break
        rates = self._cost.rates
        log.info(
            "replica %s: measured by %d requests of our own in %.1f s: a prefill of 1,024 tokens takes "
            "%.0f ms, of 8,192 %.0f ms, loading those %.1f ms, a pass %.1f ms",
            *(replica.name, self._num_sent, time.monotonic() - began),
            *(
                1e3 * rates.full_s(1024),
                1e3 * rates.full_s(8192),
                1e3 * rates.load_s(8192),
                1e3 * rates.pass_s,
            ),
        )

    async def _measure_length(self, replica: Replica, length: int, info: ReplicaInfo) -> float:
        """Return a full prefill, and a near-duplicate if both have room. Returns the seconds of the first."""
        has_room = 2 * length * info.bytes_per_token <= info.budget_bytes - info.num_bytes
        for _ in range(_TRIES):  # each with tokens that vLLM has not seen
            tokens = self._tokens(length)
            whole = await self._observed(replica, tokens, NoPlan(), store=has_room)
            try:
                if whole.finished.stored and whole.progress.was_alone:
                    plan = plan_of_copies(length, whole.finished.stored)
                    edited = with_edits(tokens, self._tokens(length))
                    near = await self._observed(replica, edited, plan, store=True)
                    await self._drop(replica, near.finished)
            finally:
                await self._drop(replica, whole.finished)
            if whole.progress.was_alone:
                break
        return whole.progress.prefill_s or 0.0

    async def _observed(
        self, replica: Replica, tokens: TokenIds, plan: Plan | NoPlan, *, store: bool
    ) -> OwnAnswer:
        """Raises UpstreamError, TimeoutError, _BusyError."""
        answered = await self._send(replica, tokens, plan, store=store)
        observe(self._cost, answered.routed, answered.progress, answered.finished)
        return answered

    async def _send(
        self, replica: Replica, tokens: TokenIds, plan: Plan | NoPlan, *, store: bool = False
    ) -> OwnAnswer:
        await self._idle([replica])
        self._num_sent += 1
        return await self.own_requests.send(replica, tokens, plan, store=store)

    async def _drop(self, replica: Replica, finished: FinishedReport) -> None:
        await self._runtime.write(self._runtime.keeper.drop_reported, replica.name, finished)

    def _tokens(self, length: int) -> TokenIds:
        return token_ids(self._random.integers(*_TOKENS, size=length))


def lengths_for(info: ReplicaInfo) -> list[int]:
    """Return the lengths of the full prefills, ascending, up to one step. Empty for a very short context."""
    most = info.settings.get("max_num_batched_tokens")
    step = most if isinstance(most, int) and most > 0 else _STEP_TOKENS
    longest = min(step, info.max_model_len - 1)  # with room for the answer's token
    return sorted({min(length, longest) for length in _LENGTHS}) if longest >= _SHORTEST else []


def with_edits(tokens: TokenIds, others: TokenIds) -> TokenIds:
    """Return the prompt with the tokens of another one where `plan_of_copies` has placeholders."""
    edited = tokens.copy()
    for hole in _holes(len(tokens)):
        edited[hole.start : hole.end] = others[hole.start : hole.end]
    return token_ids(edited)


def plan_of_copies(num_tokens: int, stored: Collection[StoredSegment]) -> Plan:
    """Copies of all that is stored of a prompt, except where it is edited."""
    holes = _holes(num_tokens)
    copies = tuple(
        Copy(
            _DONOR,
            segment.segment_id,
            part.start - segment.start,
            len(part),
            part.start,
            part.start,
            part.start,
        )
        for kept in gaps(holes, num_tokens)
        for segment in sorted(stored, key=lambda segment: segment.start)
        if (part := kept.intersection(segment.span))
    )
    return Plan(
        num_tokens,
        exact_length=holes[0].start,
        copies=copies,
        placeholders=holes,
        repairs=(),
        generation=1,
        estimate=Estimate(0.0, 0.0),
    )


def _holes(num_tokens: int) -> tuple[Span, ...]:
    """Edits at equal distances, the last one at the end: vLLM computes that itself."""
    ends = (num_tokens * number // _EDITS for number in range(1, _EDITS + 1))
    return tuple(Span(end - _EDIT_TOKENS, end) for end in ends)
