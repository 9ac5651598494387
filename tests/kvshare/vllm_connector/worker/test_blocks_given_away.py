"""Blocks that vLLM takes from a request and gives to another one in the same step."""

from __future__ import annotations

from delta_tree import SegmentId, Span
from kvshare.vllm_protocol.messages import WireCopy
from tests.kvshare.vllm_connector.worker.small_worker import NUM_TOKENS, one_rank
from tests.kvshare.vllm_connector.worker.test_steps import VALUE, Loads


def test_a_load_into_the_blocks_of_a_preempted_request_spares_its_save() -> None:
    """vLLM may give blocks away in the step in which it takes them; what is saved is read before."""
    from kvshare.vllm_connector.metadata import LoadRequest, SaveRequest, StepMetadata

    with one_rank():
        loads = Loads()
        spans = ((SegmentId(2), Span(0, NUM_TOKENS)),)
        saved = SaveRequest("p", (4, 5, 6), spans, has_ended=False)  # blocks of zeros
        loads.worker.save(StepMetadata(saves=(saved,)))
        piece = (WireCopy(SegmentId(1), 0, NUM_TOKENS, 0, 0),)
        load = LoadRequest("l", (4, 5, 6), 0, NUM_TOKENS, tuple(range(NUM_TOKENS)), piece)
        loads.step(load, preempted=frozenset({"p"}))
        (stored,) = loads.worker.attached.store.find([SegmentId(2)]).values()
        assert not stored.rows.any()
        assert loads.cache.read((4, 5, 6), Span(0, NUM_TOKENS)).k.eq(VALUE).all()
