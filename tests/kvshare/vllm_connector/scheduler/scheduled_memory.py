"""
vLLM's own scheduler and the connector's scheduler side, over a memory that only knows who wrote each slot.

Workers are what the test makes of them: copies, loads and saves end when it says.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from kvshare.vllm_protocol.messages import TICKET_KEY, Ticket, WireCopy, digest_of
from kvshare.vllm_protocol.salts import private_salt
from tests.kvshare.vllm_connector.scheduler.speculating import speculating
from tests.kvshare.vllm_connector.worker.small_worker import one_rank

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    from delta_tree import SegmentId, Span
    from kvshare.vllm_connector.metadata import LoadRequest, SaveRequest, StepMetadata, WorkerReport
    from kvshare.vllm_connector.scheduler.scheduler import ConnectorScheduler

BLOCKS, BLOCK_SIZE, STEP_TOKENS, LONGEST = 37, 4, 48, 32
BYTES_PER_TOKEN = 4
REJECTED = "a draft that was not accepted"
Stamp = tuple[str, int, int]  # who has written it, in which of its steps, at which position


@cache
def _config() -> tuple[VllmConfig, Any]:
    from kvshare_lab.device.profile import Model
    from kvshare_lab.device.vllm_config import kv_cache_config, vllm_config

    model = Model(
        num_layers=1,
        num_heads=1,
        head_dim=32,
        vocab_size=100,
        max_model_len=80,
        kv_bytes=BYTES_PER_TOKEN * 300,
        cache_tokens=BLOCKS * BLOCK_SIZE,
        step_tokens=2048,
        block_size=BLOCK_SIZE,
    )
    with TemporaryDirectory() as folder, one_rank():
        config = vllm_config(model, Path(folder), shares=True)
    config.scheduler_config.max_num_batched_tokens = STEP_TOKENS
    config.scheduler_config.async_scheduling = False
    return config, kv_cache_config(model)


class ScheduledMemory:
    """
    One vLLM. `copies_blocks`: what its workers say they can. `num_drafts`: tokens that are drafted for each
    step of an answer, of which chance accepts the first ones.
    """

    def __init__(self, *, copies_blocks: bool, num_drafts: int = 0) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        from kvshare.vllm_connector.metadata import WorkerHandshake, WorkerReport

        config, kv_cache = _config()
        config = speculating(config, num_drafts)
        with set_current_vllm_config(config):
            structured = StructuredOutputManager(config)
            self.vllm = Scheduler(config, kv_cache, structured, block_size=BLOCK_SIZE, log_stats=False)
        self.vllm.num_lookahead_tokens = num_drafts  # as with a draft model, which writes rows there
        self._num_drafts, self._chance = num_drafts, random.Random(5)
        init_none_hash(get_hash_fn_by_name("sha256"))
        self._hasher = get_request_block_hasher(BLOCK_SIZE, get_hash_fn_by_name("sha256"))
        self.vllm.connector.set_xfer_handshake_metadata_pp_aware(
            {
                (0, 0): WorkerHandshake(
                    (), can_move_keys=True, can_copy_blocks=copies_blocks, bytes_per_token=BYTES_PER_TOKEN
                )
            }
        )
        self.memory: dict[int, Stamp] = {}  # by slot
        self.segments: dict[SegmentId, list[Stamp]] = {}  # as they were saved
        self.loading: dict[str, LoadRequest] = {}
        self.reading: set[str] = set()  # of these loads, those that still read blocks
        self.joined: set[str] = set()  # loads
        self.saving: dict[str, bool] = {}  # and whether the request has ended
        self.saving_late: dict[str, SaveRequest] = {}  # from blocks that are not kept
        self.num_saved_late = 0
        self.report: WorkerReport = WorkerReport()
        self.sent: list[Request] = []
        self.num_rejected = self.num_from_blocks = self.num_waits = self.num_steps = 0
        add = self.ours.unsaved.add
        self.ours.unsaved.add = partial(self._leave, add)  # type: ignore[method-assign]
        self.vllm._preempt_request = partial(self._preempt, self.vllm._preempt_request)
        self.vllm.connector.has_pending_block_frees = self._would_wait

    @property
    def ours(self) -> ConnectorScheduler:
        found: ConnectorScheduler = self.vllm.connector._scheduler
        return found

    @property
    def pool(self) -> Any:
        return self.vllm.kv_cache_manager.block_pool

    def holders(self) -> dict[str, set[int]]:
        """Requests that hold blocks."""
        (manager,) = self.vllm.kv_cache_manager.coordinator.single_type_managers
        each = manager.req_to_blocks.items()
        return {name: {block.block_id for block in blocks} for name, blocks in each if blocks}

    def held_for_copies(self) -> set[int]:
        """Blocks that vLLM's scheduler would have free without us."""
        used = {block.block_id for block in self.pool.blocks if block.ref_cnt and not block.is_null}
        return used.difference(*self.holders().values())

    def send(self, name: str, tokens: list[int], copies: tuple[WireCopy, ...], *, max_tokens: int) -> None:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        ticket = Ticket(name, "namespace", digest_of(tokens), len(tokens), copies=copies)
        extra = {"kv_transfer_params": {TICKET_KEY: ticket.to_json()}}
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra)
        salt = private_salt(name) if copies else None
        request = Request(name, tokens, sampling, None, cache_salt=salt, block_hasher=self._hasher)
        self.sent.append(request)
        self.vllm.add_request(request)

    def end_copies(self, name: str) -> None:
        """Nothing is read for this load any more."""
        self.reading.discard(name)
        self.report.copied.add(name)

    def announce(self, name: str) -> None:
        """The load is said to have arrived; it ends in the step that it joins."""
        self.report.arriving.add(name)

    def end_load(self, name: str, *, fails: bool) -> None:
        from kvshare.vllm_connector.metadata import LoadResult

        load = self.loading.pop(name)
        self.reading.discard(name)
        for position in range(load.start, load.end):
            self._write(name, load.block_ids, position)
        for copy, target in load.targets() if not fails else ():
            if not copy.shift:  # these rows are the segment's own
                first = copy.offset + target.start - copy.target_start
                rows = self.segments[copy.segment_id][first : first + len(target)]
                slots = (_slot(load.block_ids, position) for position in range(target.start, target.end))
                self.memory.update(zip(slots, rows, strict=True))
        self.report.loads[name] = LoadResult(failed=fails)

    def step(self) -> SchedulerOutput:
        """vLLM's next step. Saves that were begun in the last one have ended."""
        from kvshare.vllm_connector.metadata import StepMetadata, WorkerReport

        scheduled = self.vllm.schedule()
        self.num_steps += 1
        metadata = scheduled.kv_connector_metadata
        assert isinstance(metadata, StepMetadata)
        self.begin(metadata)
        self.check_sources()
        sampled = dict(self._forward(scheduled))
        finished_sending = {name for name, has_ended in self.saving.items() if has_ended}
        self.report.saved_prompts |= (self.saving.keys() - finished_sending) | self.saving_late.keys()
        self.saving.clear()
        read_late = {
            id_: self._stamps(save.block_ids, span)
            for save in self.saving_late.values()
            for id_, span in save.spans
        }
        self.saving_late.clear()
        self._save(metadata)
        output = self._output(sampled, finished_sending)
        self.report = WorkerReport()
        self.vllm.update_from_output(scheduled, output)
        self._draft(scheduled)
        self._check_saved(read_late)
        return scheduled

    def _leave(self, add: Any, segments: Iterable[SegmentId], **named: Any) -> None:
        """What they have when they are left in blocks is what they must have ever after."""
        add(segment_ids := list(segments), **named)
        for segment_id in segment_ids:
            place = self.ours.donors.whole(segment_id)
            assert place is not None
            self.segments[segment_id] = self._retained(*place)

    def _check_saved(self, read: Mapping[SegmentId, list[Stamp]]) -> None:
        """What was read as late as can be is right, or dropped."""
        for segment_id, found in read.items():
            if segment_id in self.ours.segments:
                assert found == self.segments[segment_id]
                self.num_saved_late += 1

    def _stamps(self, block_ids: Any, span: Span) -> list[Stamp]:
        return [self.memory[_slot(block_ids, position)] for position in range(span.start, span.end)]

    def _retained(self, block_ids: Any, span: Span) -> list[Stamp]:
        """The same of what a segment is made of now."""
        found = self._stamps(block_ids, span)
        assert all(who != REJECTED for who, _, _ in found), "a draft that was not accepted is retained"
        return found

    def begin(self, metadata: StepMetadata) -> None:
        for load in metadata.loads:
            self.loading[load.request_id] = load
            if load.sources:
                self.reading.add(load.request_id)
                self.num_from_blocks += 1
        for name in metadata.joining:
            self.joined.add(name)
            self.end_load(name, fails=False)

    def check_sources(self) -> None:
        """What a load reads from blocks is what was saved of the segment, as long as it reads."""
        for name in self.reading:
            load = self.loading[name]
            for copy, target in load.targets():
                if (source := load.sources.get(copy)) is not None:
                    positions = range(source.first, source.first + len(target))
                    found = [self.memory[_slot(source.block_ids, position)] for position in positions]
                    first = copy.offset + target.start - copy.target_start
                    assert found == self.segments[copy.segment_id][first : first + len(target)]

    def _forward(self, scheduled: SchedulerOutput) -> Iterator[tuple[str, list[int]]]:
        for name, num_tokens in scheduled.num_scheduled_tokens.items():
            request: Request = self.vllm.requests[name]
            (block_ids,) = self.vllm.kv_cache_manager.get_block_ids(name)
            after = request.num_computed_tokens  # vLLM has advanced it
            num_drafted = len(scheduled.scheduled_spec_decode_tokens.get(name, ()))
            num_accepted = self._chance.randint(0, num_drafted)
            end = after - num_drafted + num_accepted
            for position in range(after - num_tokens, after):
                self._write(name if position < end else REJECTED, block_ids, position)
            for position in range(after, min(after + self._num_drafts, len(block_ids) * BLOCK_SIZE)):
                self._write(REJECTED, block_ids, position)  # drafts that are checked in the next step
            self.num_rejected += num_drafted - num_accepted
            yield name, [7] * (1 + num_accepted) if after >= request.num_tokens else []

    def _draft(self, scheduled: SchedulerOutput) -> None:
        """What is drafted for the next step."""
        from vllm.v1.outputs import DraftTokenIds

        if self._num_drafts:
            names = list(scheduled.num_scheduled_tokens)
            self.vllm.update_draft_token_ids(DraftTokenIds(names, [[7] * self._num_drafts for _ in names]))

    def _write(self, name: str, block_ids: Any, position: int) -> None:
        self.memory[_slot(block_ids, position)] = (name, self.num_steps, position)

    def _save(self, metadata: StepMetadata) -> None:
        for save in metadata.saves:
            if save.request_id not in self.vllm.requests:
                self.saving_late[save.request_id] = save
                continue
            self.saving[save.request_id] = save.has_ended or self.saving.get(save.request_id, False)
            for segment_id, span in save.spans:
                self.segments[segment_id] = self._retained(save.block_ids, span)

    def _output(self, sampled: Mapping[str, list[int]], finished_sending: set[str]) -> ModelRunnerOutput:
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        loads = self.report.loads
        return ModelRunnerOutput(
            req_ids=list(sampled),
            req_id_to_index={name: index for index, name in enumerate(sampled)},
            sampled_token_ids=list(sampled.values()),
            kv_connector_output=KVConnectorOutput(
                finished_sending=finished_sending or None,
                finished_recving=(loads.keys() - self.joined) | self.report.arriving or None,
                failed_recving={name for name, result in loads.items() if result.failed},
                kv_connector_worker_meta=self.report,
            ),
        )

    def _would_wait(self) -> bool:
        found = self.ours.donors.would_free
        self.num_waits += found
        return found

    def _preempt(self, preempt: Any, request: Request, *given: Any, **named: Any) -> None:
        assert not self.held_for_copies(), "without our references vLLM would have these blocks"
        preempt(request, *given, **named)


def _slot(block_ids: Any, position: int) -> int:
    return int(block_ids[position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE
