"""Which prompts measure a replica, and of what their costs are."""

from __future__ import annotations

import pytest

from delta_tree import SegmentId, Span, token_ids
from kvshare.fleet.start_measurement import fingerprint_of, lengths_for, plan_of_copies, with_edits
from kvshare.vllm_protocol.messages import StoredSegment
from tests.kvshare.fleet.real_control import info_of


@pytest.mark.parametrize(
    ("step", "context", "lengths"),
    [
        (8192, 100_000, [256, 2048, 8192]),
        (8192, 4096, [256, 2048, 4095]),  # with room for the answer's token
        (1000, 4096, [256, 1000]),
        (200, 4096, [200]),
        (8192, 129, [128]),
        (8192, 128, []),  # too short for anything to be learned
        (None, 100_000, [256, 2048, 8192]),
        ("many", 100_000, [256, 2048, 8192]),
        (0, 100_000, [256, 2048, 8192]),
    ],
)
def test_prompts_fit_into_a_step_and_into_the_context(step: object, context: int, lengths: list[int]) -> None:
    """Of a connector that does not say how much a step computes, the usual."""
    settings = {} if step is None else {"max_num_batched_tokens": step}
    assert lengths_for(info_of(max_model_len=context, settings=settings)) == lengths


def test_costs_are_those_of_a_machine_a_model_and_versions() -> None:
    """What the connector does not name is its own machine: nothing measured elsewhere is taken for it."""
    known = fingerprint_of(info_of(device="H100", fingerprint="f", settings={"b": 2, "a": 1}))
    assert known.machine == "H100"
    assert known.model == "tiny, float32, 1x1x8, f"
    assert known.versions == "vllm 0.32.0, a 1, b 2"
    assert fingerprint_of(info_of()).machine == "a device that the connector does not name"


def test_a_near_duplicate_is_planned_from_whatever_segments_its_prompt_has() -> None:
    """In order of their positions, without the four places where it is edited; every token once."""
    stored = [
        StoredSegment(SegmentId(2), 100, 156, 1560),
        StoredSegment(SegmentId(1), 0, 100, 1000),
    ]
    plan = plan_of_copies(256, stored)
    assert [(copy.segment_id, copy.offset, copy.target) for copy in plan.copies] == [
        (1, 0, Span(0, 48)),
        (1, 64, Span(64, 100)),
        (2, 0, Span(100, 112)),
        (2, 28, Span(128, 176)),
        (2, 92, Span(192, 240)),
    ]
    assert plan.placeholders == (Span(48, 64), Span(112, 128), Span(176, 192), Span(240, 256))
    assert plan.exact_length == 48
    edited = with_edits(token_ids([0] * 256), token_ids([1] * 256))
    assert [place for place in range(256) if edited[place]] == [
        place for hole in plan.placeholders for place in range(hole.start, hole.end)
    ]
