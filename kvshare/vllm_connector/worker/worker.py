"""
The connector inside a worker: writes segments into vLLM's blocks, computes placeholders, saves prompts.

    begin       before vLLM's forward pass of a step: start copies into the blocks of waiting requests
    advance     after it: compute placeholders of loads whose copies have arrived, within the step's budget
    save        after it: start saves on the thread that copies; each is reported when it is complete

A step waits for no copy, except for the save of a request that it preempts, and for at most 5 ms if it has no
forward pass. A request is scheduled when its load is reported; if the load fails, vLLM computes the prompt.
`attach_model` is called once, before the first step.

While vLLM sleeps, its KV cache has no memory: `release_caches` and `restore_caches` surround that. What is
begun meanwhile fails, so that vLLM computes it.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheSpec

from delta_tree import SegmentId, Span
from kvshare.kv.movement import why_not_movable
from kvshare.kv.parameters import model_fingerprint
from kvshare.safe_logging import classes_and_places
from kvshare.sharing.selection import RepairChoice
from kvshare.vllm_connector.config import ConnectorSettings
from kvshare.vllm_connector.metadata import (
    LoadRequest,
    LoadResult,
    SaveRequest,
    StepMetadata,
    WorkerHandshake,
    WorkerReport,
)
from kvshare.vllm_connector.worker.choosing import Choosing
from kvshare.vllm_connector.worker.copy_writer import RowCopy, write_copies
from kvshare.vllm_connector.worker.copying import CopyThread, Job, LapTimer
from kvshare.vllm_connector.worker.device import CudaDevice, Device, Times, batches
from kvshare.vllm_connector.worker.model import frequency_tables, weights_digest
from kvshare.vllm_connector.worker.paged_cache import PagedCache
from kvshare.vllm_connector.worker.partial_forward import PartialForward, Run, split
from kvshare.vllm_connector.worker.ranks import (
    agreed,
    as_one,
    check_host_memory,
    num_ranks,
    on_all_ranks,
    rank,
    shared_memory,
)
from kvshare.vllm_connector.worker.segment_store import SegmentStore, Stored, arena_bytes
from kvshare.vllm_connector.worker.self_test import SelfTest
from kvshare.vllm_connector.worker.step_budget import num_admitted

log = logging.getLogger("vllm.kvshare")

_MAX_WAIT_S = 0.005  # how long a step without a forward pass waits for copies; new requests wait meanwhile


@dataclass(eq=False)
class _Load:
    """
    A load under way. `readable`: the wanted segments whose checksums are right. Its first pass may take
    several steps: `left` is what is not computed yet, None before the first one.
    """

    request: LoadRequest
    wanted: frozenset[SegmentId]
    readable: set[SegmentId] = field(default_factory=set)
    unreadable: frozenset[SegmentId] = frozenset()  # on any rank; known when all copies have arrived
    is_cancelled: bool = False
    choosing: Choosing | None = None  # if the request has a repair order
    left: list[Run] | None = None

    @property
    def num_to_compute(self) -> int:
        """At most, with repairs that are not chosen yet."""
        order = self.request.order
        num_ordered = 0 if order is None else order.num_tokens
        if self.left is not None:
            return num_ordered + sum(len(run.span) for run in self.left)
        num_probes = 0 if order is None else len(order.probes)
        return num_ordered + num_probes + sum(map(len, self.request.runs(self.unreadable)))

    def take_runs(self, max_tokens: int) -> list[Run]:
        """The next runs of its first pass."""
        parts = list(split(self.left or (), max_tokens))
        self.left = [run for part in parts[1:] for run in part]
        return parts[0] if parts else []


class _Drop(NamedTuple):
    """Segments that no load finds any more. Their memory is free when all ranks have made earlier copies."""

    segments: Sequence[Stored]


@dataclass(eq=False)
class _Save:
    request: SaveRequest
    targets: Mapping[SegmentId, Stored]

    @property
    def has_room(self) -> bool:
        return len(self.targets) == len(self.request.spans)


class ConnectorWorker:
    """One per worker process. Methods run on vLLM's thread unless they say "on the thread that copies"."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        settings: ConnectorSettings,
        spec: KVCacheSpec,
        layer_names: Sequence[str],
    ) -> None:
        self._config = vllm_config
        self._spec = spec
        self._layer_names = list(layer_names)
        self._settings = settings
        self._can_listen = False
        self.handshake: WorkerHandshake | None = None  # None until a model is attached
        # With its number: in a new thread "cuda" alone is GPU 0, whichever this rank has.
        is_cuda = current_platform.device_type == "cuda"
        self._device = CudaDevice(torch.device("cuda", torch.cuda.current_device())) if is_cuda else Device()
        self._times = Times(self._device)
        self._step_tokens = settings.step_tokens or vllm_config.scheduler_config.max_num_batched_tokens
        self._store: SegmentStore | None = None  # None until the model's layout is known
        self._shares_memory = False  # with other ranks
        self._copies = CopyThread()
        self._copying: deque[tuple[_Load | _Save | _Drop, Job]] = deque()  # in the order of the jobs
        self._arrived: deque[_Load] = deque()  # copied but not computed yet
        self._transfers = KVConnectorTransferResults()
        self._report = WorkerReport()
        self._is_asleep = False  # vLLM's KV cache must not be touched

    def attach_model(self, model: torch.nn.Module) -> None:
        """Take the model and run the self-test. Failures are reported in the handshake, not raised."""
        try:
            on_all_ranks(partial(self._take_model, model), "another rank could not be prepared")
            self._take_memory()
            with as_one("the self-test"):
                unsupported, warnings = self._run_self_test(model)
            layout = self._cache.kv_layout
            keys, _ = layout.planes
            self.handshake = WorkerHandshake(
                unsupported=unsupported,
                warnings=warnings,
                can_move_keys=layout.can_move,
                can_listen=self._can_listen,
                rope=layout.digest,
                num_layers=layout.num_layers,
                num_kv_heads=keys.num_heads,
                head_dim=keys.dim,
                dtype=str(layout.dtype).removeprefix("torch."),
                attention_backend=f"{self._forward.backend_name}/{self._cache.layout}",
                bytes_per_token=layout.bytes_per_token,
                weights=weights_digest(model),
                fingerprint=model_fingerprint(
                    model.named_parameters(), num_layers=layout.num_layers, head_dim=keys.dim
                ),
            )
        except Exception as exc:
            log.exception("kvshare: the self-test raised an error")  # with its message: no prompt exists yet
            reason = f"the self-test raised an error: {type(exc).__name__}: {exc}"
            self.handshake = WorkerHandshake(unsupported=(reason,))

    def _take_model(self, model: torch.nn.Module) -> None:
        layers = self._config.compilation_config.static_forward_context
        self._cache = PagedCache(
            {name: layers[name] for name in self._layer_names}, block_size=self._spec.block_size
        )
        self._forward = PartialForward(model, self._cache, self._config, self._spec)

    def _take_memory(self) -> None:
        """Allocate the arena; all ranks call it together."""
        keys, _ = self._cache.kv_layout.planes
        transfer, max_bytes = self._config.kv_transfer_config, self._settings.max_bytes
        assert transfer is not None, "or there would be no connector"
        num_heads, first_head = keys.num_heads, 0
        check_host_memory(arena_bytes(max_bytes))
        buffer = shared_memory(arena_bytes(max_bytes), str(transfer.engine_id))
        if buffer is None:  # memory for this rank's heads only
            num_bytes = arena_bytes(max_bytes // num_ranks())
            # Pages are allocated now. At a save they would cost more than its copies, and running out of
            # memory then would end the process. `torch.zeros` would leave them to the first write.
            buffer = torch.empty(num_bytes, dtype=torch.uint8).zero_()
        else:
            self._shares_memory = True
            num_heads = self._config.model_config.get_total_num_kv_heads()
            copies = max(1, keys.num_heads * num_ranks() // num_heads)  # more ranks than heads: replicated
            first_head = rank() // copies * keys.num_heads
        layout = self._cache.kv_layout
        self._store = SegmentStore(buffer, layout, num_heads=num_heads, first_head=first_head)
        self._device.register(buffer)

    def _run_self_test(self, model: torch.nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Reasons why nothing can be shared, and warnings about what is limited."""
        model_config = self._config.model_config
        self_test = SelfTest(
            self._cache,
            self._forward,
            vocab_size=model_config.get_vocab_size(),
            max_model_len=model_config.max_model_len,
        )
        for check in (self_test.check_layout, self_test.check_partial_attention):
            problem = check()
            if not all(agreed([problem is None])):  # the next check needs all ranks
                return (problem or "the self-test failed on another rank",), ()
        problem = self_test.check_listening()
        self._can_listen = all(agreed([problem is None]))
        warnings = () if self._can_listen else (f"repairs are chosen by position only: {problem}",)
        tables, unsupported = frequency_tables(model)
        verifications = self_test.movements(tables)
        self._cache.kv_layout = self._cache.kv_layout.moving(
            [(k.movement, v.movement) for k, v in verifications]
        )
        if not all(agreed([self._cache.kv_layout.can_move])):
            problem = why_not_movable(verifications) or "the self-test failed on another rank"
            return (), (
                *warnings,
                f"only text at the same position is shared: {problem if tables else unsupported}",
            )
        return (), warnings

    def forget_segments(self) -> None:
        """The weights have changed: drop all segments, fail loads under way, and tell the scheduler."""
        self._report.has_new_weights = True
        self._end_loads()
        for _, job in self._copying:
            job.failed = True
        self._copying = deque(entry for entry in self._copying if not isinstance(entry[0], _Drop))
        if self._store is not None:
            self._store.clear()

    def release_caches(self) -> None:
        """
        vLLM is about to take away the memory of its KV cache. Waits for copies under way.

        What they have saved is whole. What was loaded is lost with the cache, so these loads fail. May be
        called again.
        """
        self._is_asleep = True
        self._end_loads()

    def restore_caches(self) -> None:
        """The KV cache has memory again, perhaps other tensors. May be called again."""
        if self._store is not None and not self._cache.has_same_form:
            log.error(
                "kvshare: since vLLM slept, its KV cache has another layout than at the self-test: no prompt "
                "is loaded or stored until it is started again"
            )
            return
        self._is_asleep = False

    def _end_loads(self) -> None:
        """Wait for all copies, and fail the loads, whether their copies have arrived or not."""
        for transfer, job in self._copying:
            job.wait()
            job.failed = job.failed or isinstance(transfer, _Load)
        for load in self._arrived:
            self._fail(load)
        self._arrived.clear()

    def close(self) -> None:
        """Waits for copies under way, whose memory is about to be freed."""
        self._copies.close()

    def begin(self, step: StepMetadata) -> None:
        """Before the forward pass of a step."""
        cancelled = frozenset(step.cancelled)
        for load in (*(t for t, _ in self._copying if isinstance(t, _Load)), *self._arrived):
            load.is_cancelled = load.is_cancelled or load.request.request_id in cancelled
        for request in step.loads:
            self._begin_load(request)
        self._drop(step.drops)
        for transfer, job in self._copying:
            if isinstance(transfer, _Save) and transfer.request.request_id in step.preempted:
                job.wait()  # another request writes its blocks in this step

    def advance(self, step: StepMetadata) -> None:
        """After the forward pass: report finished copies, and compute placeholders of loads."""
        if not step.has_forward:
            self._wait_for_loads()
        self._take_arrived()
        if due := self._due():
            self._compute_and_report(due)

    def save(self, step: StepMetadata) -> None:
        """After the forward pass, because the rows that it has written are saved."""
        for request in step.saves:
            self._begin_save(request)

    def take_transfers(self) -> KVConnectorTransferResults:
        """Requests whose saves and loads ended or failed since the last call."""
        transfers, self._transfers = self._transfers, KVConnectorTransferResults()
        return transfers

    def build_connector_worker_meta(self) -> WorkerReport | None:
        """The report of everything since the last call, or None."""
        report, self._report = self._report, WorkerReport()
        report.stage_seconds = self._times.take()
        return report if report != WorkerReport() else None

    def _begin_load(self, request: LoadRequest) -> None:
        assert self._store is not None, "there is a handshake"
        wanted = frozenset(copy.segment_id for copy in request.copies)
        load = _Load(request, wanted)
        if self._is_asleep:
            self._fail(load)
            return
        act = partial(self._write_copies, load, self._store.find(wanted), self._device.mark())
        self._copying.append((load, self._copies.submit(Job("loading a request's KV", act))))

    def _write_copies(
        self, load: _Load, found: Mapping[SegmentId, Stored], mark: object
    ) -> Mapping[str, float]:
        """Write all copies, keys rotated to their new positions. On the thread that copies."""
        lap = LapTimer()
        load.readable = self._readable(found)
        verify_s = lap()
        copies = []
        for copy, target in load.request.targets():
            if copy.segment_id in load.readable:
                start = copy.offset + target.start - copy.target_start
                slots = self._cache.slot_numbers(load.request.block_ids, target)
                source, rows = Span(start, start + len(target)), found[copy.segment_id].rows
                copies.append(RowCopy(rows, source, copy.shift, slots))
        prepare_s = lap()
        write_s = self._device.beside(mark, lambda: write_copies(self._cache, self._device, copies))
        return {"verify": verify_s, "write": prepare_s + write_s}

    def _readable(self, found: Mapping[SegmentId, Stored]) -> set[SegmentId]:
        return {segment_id for segment_id, stored in found.items() if stored.is_whole}

    def _begin_save(self, request: SaveRequest) -> None:
        assert self._store is not None, "there is a handshake"
        targets: dict[SegmentId, Stored] = {}
        if self._is_asleep:
            self._report_saved(_Save(request, targets), is_whole=False)
            return
        try:
            for segment_id, span in request.spans:
                targets[segment_id] = self._store.add(segment_id, len(span))
        except MemoryError as exc:
            log.warning("kvshare: a prompt is not stored: %s. Raise --kv-bytes for more room", exc)
            self._drop(targets)
            targets = {}
        save = _Save(request, targets)
        act = partial(self._copy_out, save, self._device.mark())
        self._copying.append((save, self._copies.submit(Job("saving a prompt's KV", act))))

    def _drop(self, segment_ids: Iterable[SegmentId]) -> None:
        """Free them: at once, as copies run in order; if ranks share memory, when all have copied so far."""
        if self._store is None or not (segments := self._store.take(segment_ids)):
            return
        if self._shares_memory and self._copying:
            self._copying.append((_Drop(segments), self._copies.submit(Job("dropping", dict))))
        else:
            self._store.free(segments)

    def _copy_out(self, save: _Save, mark: object) -> Mapping[str, float]:
        """Copy rows from vLLM's blocks into extents. On the thread that copies."""
        spans, rows = dict(save.request.spans), [stored.rows for stored in save.targets.values()]

        def copy(batch: slice) -> None:
            staged = self._device.room_for(rows[batch])
            own = [spans[segment_id] for segment_id in list(save.targets)[batch]]
            self._cache.gather(save.request.block_ids, own, staged)
            self._device.to_host(staged, rows[batch])

        copy_s = sum(self._device.beside(mark, partial(copy, batch)) for batch in batches(rows))
        lap = LapTimer()
        for stored in save.targets.values():
            stored.checksum = stored.computed_checksum()
        return {"save": copy_s + lap()} if rows else {}

    def _wait_for_loads(self) -> None:
        """In a step without a forward pass there is nothing else to do."""
        lap, waited = LapTimer(), 0.0
        for transfer, job in self._copying:
            if isinstance(transfer, _Load) and waited < _MAX_WAIT_S:
                job.wait(_MAX_WAIT_S - waited)
                waited += lap()

    def _take_arrived(self) -> None:
        """Take the transfers that are finished on every rank, in order, so that all ranks take the same."""
        done = agreed([job.is_done for _, job in self._copying])
        count = done.index(False) if False in done else len(done)
        finished = [self._copying.popleft() for _ in range(count)]
        are_whole = agreed([not job.failed for _, job in finished])
        loads = [transfer for transfer, _ in finished if isinstance(transfer, _Load)]
        segments = [(load, segment_id) for load in loads for segment_id in sorted(load.wanted)]
        readable = agreed([segment_id in load.readable for load, segment_id in segments])
        gone = [entry for entry, is_readable in zip(segments, readable, strict=True) if not is_readable]
        for (transfer, job), is_whole in zip(finished, are_whole, strict=True):
            if isinstance(transfer, _Drop):
                assert self._store is not None, "it had them"
                self._store.free(transfer.segments)
                continue
            self._times.note(transfer.request.request_id, job.seconds)
            if isinstance(transfer, _Save):
                self._report_saved(transfer, is_whole=is_whole)
                continue
            if not is_whole:  # its slots may hold anything
                self._fail(transfer)
                continue
            transfer.unreadable = frozenset(segment_id for load, segment_id in gone if load is transfer)
            self._arrived.append(transfer)

    def _report_saved(self, save: _Save, *, is_whole: bool) -> None:
        if not is_whole or not save.has_room:
            self._drop(save.targets)
            self._report.failed_saves.add(save.request.request_id)
        saved = self._transfers.finished_sending if save.request.has_ended else self._report.saved_prompts
        saved.add(save.request.request_id)

    def _due(self) -> list[_Load]:
        """The loads to compute in this step: in the order of arrival, within the budget."""
        sizes = (0 if load.is_cancelled else load.num_to_compute for load in self._arrived)
        return [self._arrived.popleft() for _ in range(num_admitted(sizes, self._step_tokens))]

    def _compute_and_report(self, loads: Sequence[_Load]) -> None:
        """
        Compute the placeholders of the loads, unless they were cancelled, and report them.

        Of a load that is larger than the budget, which is the only one to compute then, a part is computed
        and the rest in later steps.
        """
        began = self._device.mark()
        awaited = [load for load in loads if not load.is_cancelled]
        try:
            self._prepare([load for load in awaited if load.left is None])
            with as_one("a pass over placeholders"):
                choices, num_run = self._compute(awaited)
        except Exception as exc:  # noqa: BLE001  logged, without its message
            log.error("kvshare: computing for %d requests failed: %s", len(awaited), classes_and_places(exc))
            for load in loads:
                self._fail(load)
            return
        if num_run:
            self._times.add("pass", began, self._device.mark(), num_run)
        for load in loads:
            if load.left and not load.is_cancelled:
                self._arrived.appendleft(load)
                continue
            request_id = load.request.request_id
            repaired = choices[request_id].repairs if request_id in choices else ()
            self._transfers.finished_recving.add(request_id)
            self._report.loads[request_id] = LoadResult(False, load.unreadable, repaired)

    def _fail(self, load: _Load) -> None:
        """Report that vLLM must compute the request's prompt."""
        self._transfers.finished_recving.add(load.request.request_id)
        self._transfers.failed_recving.add(load.request.request_id)
        self._report.loads[load.request.request_id] = LoadResult(True, load.unreadable)

    def _prepare(self, loads: Sequence[_Load]) -> None:
        """Decide what the first pass of loads computes. Those with a repair order listen to it."""

        def prepare() -> None:
            for load in loads:
                if (order := load.request.order) is not None:
                    load.choosing = Choosing(
                        load.request, order, load.unreadable, self._cache, can_listen=self._can_listen
                    )

        if any(load.request.order is not None for load in loads):
            on_all_ranks(prepare, "another rank could not prepare a choice of repairs")
        for load in loads:
            request = load.request
            load.left = (
                [Run(request.block_ids, span, request.token_ids) for span in request.runs(load.unreadable)]
                if load.choosing is None
                else load.choosing.first_pass
            )

    def _compute(self, loads: Sequence[_Load]) -> tuple[dict[str, RepairChoice], dict[str, int]]:
        """
        Compute placeholders; where that is done, choose repairs and compute them.

        Returns:  the choices by request, and how many tokens were computed of each request that has any
        """
        runs = {load.request.request_id: load.take_runs(self._step_tokens) for load in loads}
        self._run(runs.values(), listens=any(load.choosing and load.choosing.listens for load in loads))
        choosing = {
            load.request.request_id: load.choosing for load in loads if load.choosing and not load.left
        }
        choices = {name: each.choice() for name, each in choosing.items()}
        behind = {name: each.second_pass(choices[name]) for name, each in choosing.items()}
        self._run(behind.values())
        num_run = Counter[str]()
        for name, own in (*runs.items(), *behind.items()):
            num_run[name] += sum(len(run.span) for run in own)
        return choices, +num_run  # without requests of which nothing was computed

    def _run(self, runs: Iterable[Sequence[Run]], *, listens: bool = False) -> None:
        together = [run for each in runs for run in each]
        if together and listens:
            self._forward.compute(together, watching=self._forward.listening)
        elif together:
            self._forward.compute(together)
