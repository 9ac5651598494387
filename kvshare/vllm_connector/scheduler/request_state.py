"""One ticketed request while vLLM runs it: may its plan be used, and which KV is in its slots by now."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from vllm.v1.request import Request

from delta_tree import SegmentId
from kvshare.engines.vllm.wire import (
    Finished,
    Stored,
    Ticket,
    WireCopy,
    digest_of,
    is_private_salt,
)
from kvshare.vllm_connector.metadata import LoadResult

# Refusals after which the prompt's own KV may still be kept: it is computed in full, and belongs to it.
_KEEPABLE = (None, "not_private", "rotation_unknown")


def unsupported_reason(request: Request, ticket: Ticket, *, may_move_keys: bool) -> str | None:
    """Why a ticket's plan must not be carried out; a fixed word, or None."""
    if request.lora_request is not None:
        return "lora"
    if request.mm_features:
        return "multimodal"
    if request.pooling_params is not None:
        return "pooling"
    if request.prompt_token_ids is None or request.prompt_embeds is not None or request.resumable:
        return "not_tokens"
    if ticket.num_tokens != request.num_prompt_tokens or ticket.prompt_digest != digest_of(
        request.prompt_token_ids
    ):
        return "prompt_mismatch"
    if not ticket.is_exact and not is_private_salt(request.cache_salt, ticket.request_id):
        return "not_private"  # others would find its blocks in vLLM's prefix cache
    if not may_move_keys and any(copy.shift for copy in ticket.copies):
        return "rotation_unknown"
    return None


@dataclass(slots=True)
class Running:
    """
    A ticketed request that has not ended.

    `used` are the copies whose KV stands in the request's slots. They change with every admission: a request
    that was preempted finds the start of its own blocks in the prefix cache and gets the rest laid again.
    """

    ticket: Ticket
    refusal: str | None
    is_first: bool  # of the choices that came with this ticket; only that one is kept and told of
    used: frozenset[int] = frozenset()
    num_local: int = 0  # tokens that vLLM's own prefix cache had at the last admission
    num_first_local: int | None = None  # the same at the first one; None before it
    spoilt: bool = False  # one copy's slots come partly from its segment: nothing of this is kept
    failed: bool = False  # a load went wrong, vLLM computes the rest
    num_awaited: int = 0  # loads that were ordered, and that the workers have not reported on
    stage_seconds: dict[str, float] = field(default_factory=dict)

    def copy(self, index: int) -> WireCopy:
        return self.ticket.copies[index]

    @property
    def may_load(self) -> bool:
        return self.refusal is None and not self.failed

    @property
    def may_keep(self) -> bool:
        return self.is_first and self.ticket.keep and not self.spoilt and self.refusal in _KEEPABLE

    def note_admission(self, held: Collection[int], num_external: int) -> None:
        """
        The slots now hold vLLM's own blocks up to `num_local`, then the `held` copies of the ticket.

        Raises nothing; where it can no longer be told what a slot holds, the request is `spoilt`.
        """
        is_resumed = self.num_first_local is not None
        if self.num_first_local is None:
            self.num_first_local = self.num_local
        if self.num_local and not is_resumed and not self.ticket.is_exact:
            self.spoilt = True  # a sibling's blocks under the same salt: laid from what it found
        self.num_awaited += num_external > 0
        used = set()
        for index, copy in enumerate(self.ticket.copies):
            before, now = index in self.used, num_external > 0 and index in held
            if copy.target.end <= self.num_local:
                now = before
            elif copy.target_start < self.num_local and before != now:
                self.spoilt = self.spoilt or not self.ticket.is_exact
            if now:
                used.add(index)
        self.used = frozenset(used)

    def note_load(self, result: LoadResult) -> None:
        """What the workers made of a load; only that of the last admission says what is in the slots."""
        self.num_awaited -= 1
        for stage, seconds in result.stage_seconds.items():
            self.stage_seconds[stage] = self.stage_seconds.get(stage, 0.0) + seconds
        if self.num_awaited:
            return
        self.failed = self.failed or result.failed
        lost = frozenset(
            index
            for index in self.used
            if self.copy(index).target.end > self.num_local
            and (result.failed or self.copy(index).segment_id in result.unreadable)
        )
        if not self.ticket.is_exact and any(self.copy(i).target_start < self.num_local for i in lost):
            self.spoilt = True  # its first slots were laid at an earlier admission
        self.used -= lost

    @property
    def reason(self) -> str | None:
        """Why less was shared than planned; a fixed word."""
        if self.refusal is not None:
            return self.refusal
        if self.failed:
            return "load_failed"
        if not self.ticket.is_exact and len(self.used) < len(self.ticket.copies):
            return "segments_gone"
        return None


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that has ended. `stored` and `used` make up its kept prompt, unless it was `lost` since."""

    running: Running
    num_prompt: int
    used: frozenset[int] = frozenset()
    output_ids: tuple[int, ...] = ()
    stored: tuple[Stored, ...] = ()
    lost: str | None = None  # why nothing is kept after all

    def is_whole(self, unreadable: Collection[SegmentId]) -> bool:
        """Whether the kept prompt still consists of what it was taken to consist of."""
        running = self.running
        if any(running.copy(index).segment_id in unreadable for index in self.used):
            return False
        return running.ticket.is_exact or self.used <= running.used

    def event(self) -> Finished:
        """What the journal says of it."""
        running = self.running
        num_local = running.num_first_local or 0
        laid = (running.copy(index).target for index in running.used)
        num_laid = sum(max(0, target.end - max(target.start, num_local)) for target in laid)
        is_kept = bool(self.stored) and self.lost is None
        return Finished(
            request_id=running.ticket.request_id,
            decision=_decision(running, num_local, num_laid),
            reason=self.lost or running.reason,
            used=tuple(sorted(self.used)) if is_kept else (),
            num_computed=max(0, self.num_prompt - num_local - num_laid),
            num_local=num_local,
            output_ids=self.output_ids if is_kept else (),
            stored=self.stored if is_kept else (),
            stage_seconds=dict(running.stage_seconds),
        )


def _decision(running: Running, num_local: int, num_laid: int) -> str:
    if running.used and not running.ticket.is_exact:
        return "approx"
    return "exact" if num_local or num_laid else "full"
