"""
The connector inside a worker: writes segments into vLLM's blocks, computes what lies between, saves prompts.

`attach_model` comes once the model and its caches are there. A load that fails is computed in full instead.
Where even that fails, vLLM computes the blocks that are reported as failed.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheSpec

from delta_tree import SegmentId, Span
from kvshare.kv.fingerprint import model_fingerprint
from kvshare.kv.memory_tier import MemoryTier
from kvshare.kv.movement import Proof
from kvshare.kv.segment import SegmentKV
from kvshare.safe_logging import classes_and_places
from kvshare.vllm_connector.metadata import (
    LoadRequest,
    LoadResult,
    StepMetadata,
    WorkerHandshake,
    WorkerReport,
)
from kvshare.vllm_connector.worker.choosing import Choosing
from kvshare.vllm_connector.worker.laying import Laying
from kvshare.vllm_connector.worker.model import frequency_tables, weights_digest
from kvshare.vllm_connector.worker.paged_cache import PagedCache
from kvshare.vllm_connector.worker.partial_forward import PartialForward, Run
from kvshare.vllm_connector.worker.ranks import agreed, as_one, num_ranks, on_all_ranks, summed
from kvshare.vllm_connector.worker.self_test import SelfTest
from kvshare.vllm_connector.worker.stopwatch import Times, stopwatch_of

log = logging.getLogger("vllm.kvshare")

_Found = Mapping[SegmentId, SegmentKV]  # readable on every rank
_NONE: _Found = {}


class ConnectorWorker:
    """One per worker process; everything runs on the worker's thread."""

    def __init__(self, vllm_config: VllmConfig, spec: KVCacheSpec, layer_names: Sequence[str]) -> None:
        self._config = vllm_config
        self._spec = spec
        self._layer_names = list(layer_names)
        self.forget_segments()
        self._can_listen = False
        self.handshake: WorkerHandshake | None = None  # None: no model was attached
        self._invalid_blocks: set[int] = set()
        self._saved: set[str] = set()
        self._report = WorkerReport()
        self._times = Times(stopwatch_of(torch.device(current_platform.device_type)))

    def attach_model(self, model: torch.nn.Module) -> None:
        """Take the model and run the self-test with it. Raises nothing: failures are in the handshake."""
        try:
            on_all_ranks(partial(self._take_model, model), "another rank could not be prepared")
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
            log.exception("kvshare: the self-test raised an error")  # whole: there were no prompts yet
            reason = f"the self-test raised an error: {type(exc).__name__}: {exc}"
            self.handshake = WorkerHandshake(unsupported=(reason,))

    def _take_model(self, model: torch.nn.Module) -> None:
        layers = self._config.compilation_config.static_forward_context
        self._cache = PagedCache(
            {name: layers[name] for name in self._layer_names}, block_size=self._spec.block_size
        )
        self._forward = PartialForward(model, self._cache, self._config, self._spec)

    def _run_self_test(self, model: torch.nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Why nothing can be shared, and what works, but not as meant."""
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
        warnings = () if self._can_listen else (f"repairs are chosen by their place alone: {problem}",)
        tables, refused = frequency_tables(model)
        proofs = self_test.movements(tables)
        self._cache.kv_layout = self._cache.kv_layout.moving([(k.movement, v.movement) for k, v in proofs])
        if not all(agreed([self._cache.kv_layout.can_move])):
            problem = refused if not tables else _unproved(proofs)
            return (), (*warnings, f"only text at the same position is shared: {problem}")
        return (), warnings

    def start_load_kv(self, loads: Sequence[LoadRequest]) -> None:
        """
        Make the requested slots valid, before vLLM's forward pass of this step.

        Raises: RuntimeError under async scheduling, where even computing them failed. vLLM 0.32 has another
        step under way by the time it hears of failed blocks, and would deliver what that samples from them
        """
        began = self._times.mark()
        found = self._fetch(loads)
        wanted = _num_placed(loads, frozenset())
        self._times.add("fetch", began, self._times.mark(), wanted)
        results = self._try_to_load(loads, found)
        if results is None:
            results = self._try_to_load(loads, None)
        if results is not None:
            self._report.loads.update(results)
        elif self._config.scheduler_config.async_scheduling:
            raise RuntimeError(f"kvshare: the KV of {len(loads)} requests could not be computed")
        else:
            for load in loads:
                # Those behind `end`, too: vLLM's forward pass fills them from the failed ones.
                self._invalid_blocks.update(load.block_ids[load.start // self._cache.block_size :])
                self._report.loads[load.request_id] = LoadResult(failed=True)

    def _try_to_load(
        self, loads: Sequence[LoadRequest], found: _Found | None
    ) -> dict[str, LoadResult] | None:
        """
        Write what was found and compute the rest. Results by request; None if that failed.

        `found` None: it did once, and now everything is computed.
        """
        began = self._times.mark()
        unreadable = _segment_ids(loads).difference(found or ())
        try:
            if found is not None:
                on_all_ranks(partial(self._place, loads, found), "another rank could not write its segments")
            placed = self._times.mark()
            choosing = self._choices_to_make(loads, unreadable) if found is not None else {}
            with as_one("a pass over placeholders"):
                passed = self._compute(loads, unreadable, choosing)
        except Exception as exc:  # noqa: BLE001  logged, without its message
            log.error("kvshare: loading %d requests failed: %s", len(loads), classes_and_places(exc))
            return None
        computed = self._times.mark()
        self._times.add("lay", began, placed, _num_placed(loads, unreadable))
        num_run = {load.request_id: passed[load.request_id].num_tokens for load in loads}
        self._times.add("pass", placed, computed, num_run)
        results = {}
        for load in loads:
            gone = frozenset() if found is None else unreadable & _segment_ids([load])
            results[load.request_id] = LoadResult(found is None, gone, passed[load.request_id].repaired)
        return results

    def forget_segments(self) -> None:
        """Start with none: any there were are of another model now."""
        self._store = MemoryTier(sys.maxsize)  # this rank's heads; the scheduler side says what is dropped

    def wait_for_save(self, step: StepMetadata) -> None:
        """After the forward pass: drop segments, then save new ones."""
        self._store.drop(step.drops)
        for save in step.saves:
            began = self._times.mark()
            try:
                for segment_id, span in save.spans:
                    segment = self._cache.read(save.block_ids, span)
                    self._store.put(segment_id, segment, segment.checksum())
            except Exception as exc:  # noqa: BLE001  logged, without its message
                log.error("kvshare: a prompt was not saved: %s", classes_and_places(exc))
                self._store.drop(segment_id for segment_id, _ in save.spans)
                self._report.failed_saves.add(save.request_id)
            (self._saved if save.has_ended else self._report.saved_prompts).add(save.request_id)
            self._times.add("save", began, self._times.mark(), {save.request_id: 1})

    def get_finished(self) -> set[str]:
        """Requests whose blocks are no longer needed, since the last call."""
        saved, self._saved = self._saved, set()
        return saved

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that could not be filled, since the last call."""
        blocks, self._invalid_blocks = self._invalid_blocks, set()
        return blocks

    def build_connector_worker_meta(self) -> WorkerReport | None:
        """What happened since the last call, or None."""
        report, self._report = self._report, WorkerReport()
        report.stage_seconds = self._times.take()
        return report if report != WorkerReport() else None

    def _fetch(self, loads: Sequence[LoadRequest]) -> _Found:
        """The segments that are neither missing nor corrupt on any rank: passes must be the same."""
        ids, found = sorted(_segment_ids(loads)), _NONE
        try:
            found = self._fetched(ids)
        except Exception as exc:  # noqa: BLE001  logged, without its message; the other ranks wait to agree
            log.error("kvshare: segments could not be read: %s", classes_and_places(exc))
        readable = agreed([segment_id in found for segment_id in ids])
        return {segment_id: found[segment_id] for segment_id, ok in zip(ids, readable, strict=True) if ok}

    def _fetched(self, ids: Sequence[SegmentId]) -> _Found:
        return self._store.fetch(ids).segments

    def _place(self, loads: Sequence[LoadRequest], found: _Found) -> None:
        """Write all copies of all loads, with keys moved to where they are going."""
        laying = Laying(self._cache)
        for load in loads:
            for copy, target in load.targets():
                if (segment := found.get(copy.segment_id)) is None:
                    continue
                start = copy.offset + target.start - copy.target_start
                source = Span(start, start + len(target))
                laying.add(segment, source, copy.shift, self._cache.slots(load.block_ids, target))
        laying.write()

    def _choices_to_make(
        self, loads: Sequence[LoadRequest], unreadable: frozenset[SegmentId]
    ) -> dict[str, Choosing]:
        """What chooses repairs, by request, where a load has them chosen."""
        if all(load.order is None for load in loads):
            return {}
        return on_all_ranks(
            partial(self._choosing, loads, unreadable), "another rank could not prepare a choice of repairs"
        )

    def _compute(
        self,
        loads: Sequence[LoadRequest],
        unreadable: frozenset[SegmentId],
        choosing: Mapping[str, Choosing],
    ) -> dict[str, _Passed]:
        """Everything that is not laid, and repairs. By request."""
        runs = {
            load.request_id: choosing[load.request_id].first_pass
            if load.request_id in choosing
            else [Run(load.block_ids, span, load.token_ids) for span in load.runs(unreadable)]
            for load in loads
        }
        self._run(runs.values(), listens=any(each.listens for each in choosing.values()))
        choices = {name: each.choice(summed, num_ranks()) for name, each in choosing.items()}
        behind = {name: each.second_pass(choices[name]) for name, each in choosing.items()}
        self._run(behind.values())
        return {
            name: _Passed(
                sum(len(run.span) for run in (*runs[name], *behind.get(name, ()))),
                choices[name].repairs if name in choices else (),
            )
            for name in runs
        }

    def _choosing(
        self, loads: Sequence[LoadRequest], unreadable: frozenset[SegmentId]
    ) -> dict[str, Choosing]:
        return {
            load.request_id: Choosing(load, load.order, unreadable, self._cache, can_listen=self._can_listen)
            for load in loads
            if load.order is not None
        }

    def _run(self, runs: Iterable[Sequence[Run]], *, listens: bool = False) -> None:
        together = [run for each in runs for run in each]
        if together and listens:
            self._forward.compute(together, watching=self._forward.listening)
        elif together:
            self._forward.compute(together)


@dataclass(frozen=True, slots=True)
class _Passed:
    """What was computed for a load."""

    num_tokens: int
    repaired: tuple[Span, ...]


def _segment_ids(loads: Sequence[LoadRequest]) -> frozenset[SegmentId]:
    return frozenset(copy.segment_id for load in loads for copy in load.copies)


def _unproved(proofs: Sequence[tuple[Proof, Proof]]) -> str:
    """Of the first layer whose rows cannot be moved."""
    for layer, (k, v) in enumerate(proofs):
        for name, proof in (("keys", k), ("values", v)):
            if proof.movement is None:
                return f"{name} of layer {layer}: {proof.reason}"
    return "the self-test failed on another rank"


def _num_placed(loads: Iterable[LoadRequest], unreadable: frozenset[SegmentId]) -> dict[str, int]:
    """How many tokens are laid for each request."""
    return {load.request_id: sum(len(span) for _, span in load.targets(unreadable)) for load in loads}
