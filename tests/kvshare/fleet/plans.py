"""A prompt of 100 tokens, and plans for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from delta_tree import Copy, NodeId, SegmentId, Span, gaps, token_ids
from kvshare.namespace import Owner
from kvshare.sharing.plan import Plan, RepairOrder
from kvshare.sharing.rates import Estimate

PROMPT = token_ids(np.arange(100, dtype=np.int32))
OWNER = Owner("acme", "tenant")


def plan_of(*copies: tuple[int, int, int], exact_length: int = 0) -> Plan:
    """Copies (target start, length, shift), each of a segment of its own."""
    planned = tuple(
        Copy(NodeId(number), SegmentId(number), 0, length, start, start - shift, start - shift)
        for number, (start, length, shift) in enumerate(copies, start=1)
    )
    return Plan(
        num_tokens=100,
        exact_length=exact_length,
        copies=planned,
        placeholders=gaps((copy.target for copy in planned), 100),
        repairs=(),
        generation=1,
        estimate=Estimate(1.0, 0.5),
    )


PLAN = plan_of((0, 20, 0), (30, 30, 5), (70, 20, 5), exact_length=20)

ORDERED = replace(
    PLAN, order=RepairOrder(stretches=(Span(30, 60), Span(70, 84)), probes=(30, 32, 70), num_tokens=6)
)
