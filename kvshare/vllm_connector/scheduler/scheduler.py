"""
The scheduler side: tickets of running requests become orders, and what came of them becomes journal events.

Everything runs on the scheduler's thread, but for `drop`, which the control server may call at any time. A
ticket that cannot be used costs its request the sharing, never the answer.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from delta_tree import SegmentId, gaps, new_segment_id
from kvshare.engines.vllm.wire import TICKET_KEY, Dropped, Stored, Ticket, WireError
from kvshare.vllm_connector.metadata import LoadRequest, LoadResult, SaveRequest, StepMetadata, WorkerReport
from kvshare.vllm_connector.scheduler.event_log import EventLog
from kvshare.vllm_connector.scheduler.request_state import Ended, Running, unsupported_reason
from kvshare.vllm_connector.scheduler.segment_index import HeldSegment, SegmentIndex

log = logging.getLogger("vllm.kvshare")

_MAX_SEEN = 4096


class ConnectorScheduler:
    """One per scheduler. Requests are known by vLLM's request id; events carry the proxy's."""

    def __init__(
        self,
        segments: SegmentIndex,
        events: EventLog,
        *,
        bytes_per_token: int,
        block_size: int,
        may_move_keys: bool,
    ) -> None:
        self._segments = segments
        self._events = events
        self._bytes_per_token = bytes_per_token
        self._block_size = block_size
        self._may_move_keys = may_move_keys
        self._running: dict[str, Running] = {}
        self._ended: dict[str, Ended] = {}
        self._seen: OrderedDict[str, None] = OrderedDict()  # n > 1 sends one ticket n times
        self._loads: list[LoadRequest] = []
        self._saves: list[SaveRequest] = []
        self._drops: list[SegmentId] = []
        self._drops_lock = threading.Lock()

    def on_new_request(self, request: Request) -> None:
        """Take a request's ticket, if it has one."""
        document = (request.kv_transfer_params or {}).get(TICKET_KEY)
        if document is None:
            return
        try:
            ticket = Ticket.from_json(document)
        except WireError as exc:
            log.warning("request %s: its ticket cannot be read: %s", request.request_id, exc)
            return
        refusal = unsupported_reason(request, ticket, may_move_keys=self._may_move_keys)
        is_first = ticket.request_id not in self._seen
        self._seen[ticket.request_id] = None
        if len(self._seen) > _MAX_SEEN:
            self._seen.popitem(last=False)
        self._running[request.request_id] = Running(ticket, refusal=refusal, is_first=is_first)

    def get_num_new_matched_tokens(self, request: Request, num_local: int) -> int:
        """How many tokens behind the `num_local` that vLLM has itself can be provided, this very step."""
        running = self._running.get(request.request_id)
        if running is None:
            return 0
        running.num_local = num_local
        if not running.may_load:
            return 0
        held = self._held(running.ticket)
        return max(0, max((running.copy(index).target.end for index in held), default=0) - num_local)

    def update_state_after_alloc(self, request: Request, block_ids: Sequence[int], num_external: int) -> None:
        """The request has its blocks, and this step is to provide `num_external` tokens."""
        running = self._running.get(request.request_id)
        if running is None:
            return
        held = self._held(running.ticket) if num_external else frozenset()
        running.note_admission(held, num_external)
        if not num_external:
            return
        start, end = running.num_local, running.num_local + num_external
        copies = [running.copy(index) for index in sorted(held)]
        self._segments.touch(copy.segment_id for copy in copies)
        self._loads.append(
            LoadRequest(
                request_id=request.request_id,
                block_ids=tuple(block_ids),
                ready=start,
                start=start,
                end=end,
                token_ids=tuple(request.all_token_ids[:end]),
                copies=tuple(copy for copy in copies if copy.target.end > start),
            )
        )

    def build_connector_meta(self, step: SchedulerOutput) -> StepMetadata:
        """All that was ordered since the last call; `step` is what vLLM itself is going to do."""
        with self._drops_lock:
            drops, self._drops = tuple(self._drops), []
        loads, saves = self._loads, self._saves
        self._loads, self._saves = [], []
        if any(load.start for load in loads):
            written = _written_blocks(step, self._block_size)
            loads = [replace(load, ready=self._num_ready(load, written)) for load in loads]
        if drops:  # of a prompt, too, that was to be saved now: the worker drops first
            saves = [save.without(drops) for save in saves]
        return StepMetadata(tuple(loads), tuple(saves), drops)

    def _num_ready(self, load: LoadRequest, written: Collection[int]) -> int:
        """How many of the tokens before `start` are there before vLLM's forward pass."""
        local = load.block_ids[: load.start // self._block_size]
        first = next((index for index, block_id in enumerate(local) if block_id in written), None)
        return load.start if first is None else first * self._block_size

    def request_finished(self, request: Request, block_ids: Sequence[int]) -> bool:
        """The request has ended, however. Returns whether its blocks must stay until its KV is saved."""
        running = self._running.pop(request.request_id, None)
        if running is None:
            return False
        ended = Ended(running, num_prompt=request.num_prompt_tokens)
        num_kept = self._num_kept(request, running)
        if num_kept:
            ended = self._keep(ended, request, block_ids, num_kept)
        if ended.stored or running.num_awaited:
            self._ended[request.request_id] = ended  # published when the workers have reported
        else:
            self._publish(ended)
        return bool(ended.stored)

    def _keep(self, ended: Ended, request: Request, block_ids: Sequence[int], num_kept: int) -> Ended:
        """Make room for what no stored segment covers, and order it to be saved."""
        running = ended.running
        used = self._used(running)
        if not running.ticket.is_exact and not running.used <= frozenset(used):
            return replace(ended, lost="segments_gone")  # copied KV is not to be kept as computed
        spans = gaps((running.copy(index).target for index in used), num_kept)
        namespace = running.ticket.namespace
        entries = [HeldSegment(namespace, len(span), len(span) * self._bytes_per_token) for span in spans]
        evicted = self._segments.make_room(
            sum(entry.num_bytes for entry in entries),
            keep=(running.copy(index).segment_id for index in used),
        )
        if evicted is None:
            return replace(ended, lost="no_room")
        self._forget(evicted)
        ids = [new_segment_id() for _ in spans]
        for segment_id, entry in zip(ids, entries, strict=True):
            self._segments.add(segment_id, entry)
        kept = replace(
            ended,
            used=frozenset(used),
            output_ids=tuple(request.output_token_ids[: num_kept - request.num_prompt_tokens]),
            stored=tuple(
                Stored(segment_id, span.start, len(span), entry.num_bytes)
                for segment_id, span, entry in zip(ids, spans, entries, strict=True)
            ),
        )
        self._saves.append(
            SaveRequest(request.request_id, tuple(block_ids), tuple(zip(ids, spans, strict=True)))
        )
        return kept

    def update_connector_output(self, report: WorkerReport | None, saved: Iterable[str]) -> None:
        """Take what the workers say of a step, and the requests whose KV they have saved by now."""
        report = report if report is not None else WorkerReport()
        for request_id, result in report.loads.items():
            self._note_load(request_id, result)
        self._forget(self._segments.remove(report.unreadable))
        for request_id in saved:
            ended = self._ended.pop(request_id, None)
            if ended is None:
                continue
            ended.running.stage_seconds["save"] = report.save_seconds.get(request_id, 0.0)
            if request_id in report.failed_saves:
                ended = replace(ended, lost="save_failed")
            elif ended.lost is None and not self._holds_all(ended):
                ended = replace(ended, lost="segments_gone")
            if ended.lost is not None:
                self._forget(self._segments.remove(stored.segment_id for stored in ended.stored))
            self._publish(ended)

    def _note_load(self, request_id: str, result: LoadResult) -> None:
        """A request may have ended in the very step that loaded it."""
        if (running := self._running.get(request_id)) is not None:
            running.note_load(result)
        elif (ended := self._ended.get(request_id)) is not None:
            ended.running.note_load(result)
            if not ended.stored and not ended.running.num_awaited:
                self._publish(self._ended.pop(request_id))
            elif ended.stored and not ended.is_whole(result.unreadable):
                lost = "load_failed" if result.failed else "segments_gone"
                self._ended[request_id] = replace(ended, lost=lost)

    def drop(self, segment_ids: Iterable[SegmentId]) -> int:
        """Let go of segments on request. Returns how many were held. From any thread."""
        removed = self._segments.remove(segment_ids)
        self._forget(removed)
        return len(removed)

    def reset_cache(self) -> None:
        """The weights may have changed: nothing that is held is of this model any more."""
        self.drop(self._segments.ids())
        for running in self._running.values():
            running.spoilt = True

    def _num_kept(self, request: Request, running: Running) -> int:
        """
        Leading tokens whose KV is in the slots for good; 0 if nothing is to be kept.

        The last sampled token is never computed. A request that was preempted has no slots left, and one that
        was aborted in prefill has not filled them.
        """
        num_kept: int = request.num_prompt_tokens + request.num_output_tokens - 1
        if not running.may_keep or not request.num_output_tokens or request.num_computed_tokens < num_kept:
            return 0
        return num_kept

    def _held(self, ticket: Ticket) -> frozenset[int]:
        """Indices of a ticket's copies whose segments are there."""
        return frozenset(
            index
            for index, copy in enumerate(ticket.copies)
            if self._segments.covers(copy.segment_id, ticket.namespace, end=copy.offset + copy.length)
        )

    def _holds_all(self, ended: Ended) -> bool:
        """Whether nothing of a kept prompt was evicted or dropped while it was being saved."""
        return ended.used <= self._held(ended.running.ticket) and all(
            stored.segment_id in self._segments for stored in ended.stored
        )

    def _used(self, running: Running) -> Collection[int]:
        """
        The copies that the kept prompt consists of.

        Exact KV is the same wherever it came from: a prompt that vLLM's own prefix cache had points to the
        stored segments just as well.
        """
        held = self._held(running.ticket)
        if running.refusal is not None:
            return ()
        return held if running.ticket.is_exact else running.used & held

    def _forget(self, segment_ids: Sequence[SegmentId]) -> None:
        if segment_ids:
            with self._drops_lock:
                self._drops.extend(segment_ids)
            self._events.append(Dropped(tuple(segment_ids)))

    def _publish(self, ended: Ended) -> None:
        if ended.running.is_first:
            self._events.append(ended.event())


def _written_blocks(step: SchedulerOutput, block_size: int) -> frozenset[int]:
    """The blocks that vLLM's own forward pass of a step writes to."""
    assert step.kv_connector_block_state is not None
    cached = step.scheduled_cached_reqs
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    computed |= {request.req_id: request.num_computed_tokens for request in step.scheduled_new_reqs}
    written: set[int] = set()
    for request_id, num_tokens in step.num_scheduled_tokens.items():
        first, end = computed[request_id] // block_size, -(-(computed[request_id] + num_tokens) // block_size)
        written.update(step.kv_connector_block_state.resolve_block_ids(request_id)[0][first:end])
    return frozenset(written)
