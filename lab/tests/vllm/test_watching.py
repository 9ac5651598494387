"""What a benchmark sees of a vLLM while it watches it."""

from __future__ import annotations

from delta_tree import SegmentId
from kvshare.fleet.client import ControlClient
from kvshare.vllm_protocol.messages import FinishedReport
from kvshare_lab.vllm.session import watching
from tests.fake_vllm import running_vllm


async def test_a_benchmark_sees_what_happens_while_it_watches() -> None:
    """What came before is not counted, what comes last is."""
    async with running_vllm() as vllm:
        vllm._tell(FinishedReport("before", "full", None))
        vllm.segments[SegmentId(1)] = ("n", (1, 2))
        async with ControlClient(vllm.control_url) as control, watching(control) as watch:
            vllm._tell(FinishedReport("r", "exact", "no_room"))
            vllm.evict(SegmentId(1))
    assert watch.decisions == {"exact": 1, "reason:no_room": 1}
    assert (watch.num_dropped, watch.max_bytes) == (1, 10**7)
