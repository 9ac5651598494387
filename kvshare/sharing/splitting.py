"""
Loads a part of a prompt and computes the rest at the same time, where KV is read from a disk.

    position   0                     place                             num_tokens
    plan       [ copy ][ph][ copy ][ copy ][ph][ copy ][ copy ][ tail ]
    split      [ computed ahead     ][ copy ][ph][ copy ][ copy ][ tail ]
                 by the engine          meanwhile read from disk

What a token attends to stands before it, so the beginning can be computed before anything is read. The end,
whose tokens attend to most, takes longest to compute, and as long to read as any. So the plan copies what
comes after one place: the one up to which computing takes as long as reading the rest. A disk that is slower
than computing saves time, too; one that is late costs only what it is waited for beyond that place.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Sequence
from dataclasses import replace
from itertools import accumulate

from delta_tree import SegmentId, Span, merge
from kvshare.reasons import Reason
from kvshare.sharing.plan import NoPlan, Plan, RepairOrder, uncovered, within
from kvshare.sharing.rates import Rates

# How much longer a pass over a long run takes than the engine's own steps, from which the rates are learned:
# 6 % for its tokens as measured on an H100, and it comes in several passes.
OF_STEPS = 1.08


def split_reads(plan: Plan, rates: Rates) -> Plan:
    """
    Return the plan, or a faster one that copies only what comes after some place and computes the rest
    meanwhile.

    Its deviation is at most the predicted one: what it computes more has no other context.
    """
    on_disk = rates.queue.to_read
    if not rates.computes_ahead or not plan.num_in(on_disk):
        return plan
    reads = [copy.segment_id in on_disk for copy in plan.copies]
    num_read = [*accumulate(copy.length * reads[number] for number, copy in enumerate(plan.copies))]
    num_copied = [*accumulate(copy.length for copy in plan.copies)]

    def is_loaded_first(number: int) -> bool:
        """Return whether what comes after this copy is loaded before all up to its end is computed."""
        load_s = rates.disk_s(num_read[-1] - num_read[number])
        load_s += rates.load_s(num_copied[-1] - num_copied[number])
        return load_s <= OF_STEPS * rates.ahead_s(plan.copies[number].target_end)

    *numbers, _ = (number for number, is_read in enumerate(reads) if is_read)  # something is read after each
    first = bisect_left(numbers, True, key=is_loaded_first)
    near = (plan.copies[number].target_end for number in numbers[max(0, first - 1) : first + 1])
    return min([plan, *(_after(place, plan, rates) for place in near)], key=_seconds)


def _after(place: int, plan: Plan, rates: Rates) -> Plan:
    """Return the plan that copies from a place on."""
    dropped = [copy.target for copy in within(plan.copies, Span(0, place))]
    kept = within(plan.copies, Span(place, plan.num_tokens))
    ahead = Span(0, kept[0].target_start)
    shortened = replace(
        plan,
        copies=kept,
        placeholders=uncovered(kept, plan.num_tokens),
        repairs=merge([*plan.repairs, *dropped]),
        order=_order_within([Span(ahead.end, plan.num_tokens)], plan.order),
        num_ahead=ahead.end,
    )
    work = shortened.work(num_extra_passes=rates.num_extra_passes, queue=rates.queue)
    return replace(shortened, estimate=rates.estimate(plan.num_tokens, work))


def without_late(plan: Plan, late: Container[SegmentId]) -> Plan | NoPlan:
    """Return the plan as it is carried out where some segments came too late: what they had is computed."""
    dropped = [copy.target for copy in plan.copies if copy.segment_id in late]
    if not dropped:
        return plan
    kept = tuple(copy for copy in plan.copies if copy.segment_id not in late)
    if not kept:
        return NoPlan(Reason.KV_LATE, plan.prediction)
    return replace(
        plan,
        copies=kept,
        placeholders=uncovered(kept, plan.num_tokens),
        repairs=merge([*plan.repairs, *dropped]),
        order=_order_within(merge(copy.target for copy in kept), plan.order),
        reason=Reason.KV_LATE,
    )


def _order_within(spans: Sequence[Span], order: RepairOrder | None) -> RepairOrder | None:
    """Return the part of a repair order in these spans, with as many repairs as there is room for."""
    if order is None:
        return None
    stretches = tuple(
        part for stretch in order.stretches for span in spans if (part := stretch.intersection(span))
    )
    probes = tuple(place for place in order.probes if any(span.start <= place < span.end for span in spans))
    num_tokens = min(order.num_tokens, sum(map(len, stretches)))
    return RepairOrder(stretches, probes, num_tokens) if num_tokens else None


def _seconds(plan: Plan) -> float:
    return plan.estimate.shared_s
