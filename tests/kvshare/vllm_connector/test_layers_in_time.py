"""
Passes that begin before their load has arrived, in a real vLLM: the answers are those of a full prefill.

The GPU is pretended. Copies are made at the very moment at which the pass waits for them, layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.kvshare.vllm_connector.test_choosing import scene

if TYPE_CHECKING:
    from kvshare.vllm_protocol.messages import FinishedReport
    from tests.kvshare.vllm_connector.in_process_vllm import Answer, Copies, Texts, Vllm

LIMIT = 1e-4
BUFFER_BYTES = 300_000  # less than two layers of a prompt
SCATTERED = ((0, 100), (130, 300), (301, 500), (520, 590))


class Piped:
    """
    A vLLM whose connector copies as on a GPU, and computes early whatever it can.

    `waits`: how often the pass waited for a layer.
    """

    def __init__(self, vllm: Vllm, patch: pytest.MonkeyPatch, *, can_listen: bool = False) -> None:
        from kvshare.vllm_connector.worker.paces import Paces
        from kvshare.vllm_connector.worker.reports import Reports
        from tests.kvshare.vllm_connector.worker.deferred_gpu import deferred_device

        device, gpu = deferred_device(BUFFER_BYTES)
        self.vllm, self.gpu, self.waits = vllm, gpu, 0
        worker = vllm.worker
        for name, value in (("_attached", worker.attached), ("_parts", worker._parts)):
            patch.setattr(worker, name, value)  # as they are, to be put back
        patch.setattr(worker, "_start", replace(worker._start, device=device))
        patch.setattr(worker, "_reports", Reports(device))
        worker.use(worker.attached, can_listen=can_listen)
        self.used = worker.parts
        patch.setattr(Paces, "are_in_time", lambda *_, **__: True)
        gpu.is_eager = True
        self._copy_when_awaited(patch)
        self._begin_before_anything_is_there(patch)

    def _copy_when_awaited(self, patch: pytest.MonkeyPatch) -> None:
        from kvshare.vllm_connector.worker.gpu import Stream

        gpu, record, wait = self.gpu, self.gpu.record, self.gpu.wait

        def recording(stream: Any) -> Any:
            mark = record(stream)
            if stream is Stream.VLLM:  # the CPU, which does everything at once
                gpu.run(stream)
            return mark

        def waiting(stream: Any, mark: Any) -> None:
            if stream is Stream.VLLM and mark.at is None:
                self.waits += 1
                gpu.run_until(mark)
            wait(stream, mark)

        patch.setattr(gpu, "record", recording)
        patch.setattr(gpu, "wait", waiting)

    def _begin_before_anything_is_there(self, patch: pytest.MonkeyPatch) -> None:
        gpu, early = self.gpu, self.used.early
        begin, begin_load = early.begin, gpu.begin_load

        def beginning(load: Any) -> None:
            assert any(load.work.arrivals.pending_bytes()), "nothing is there yet"
            begin(load)
            choosing = load.early.choosing
            has_more = choosing is not None and choosing.is_brief and choosing.listens
            gpu.is_eager = not has_more

        def loading(*given: Any) -> Any:
            gpu.is_eager = False
            return begin_load(*given)

        patch.setattr(gpu, "begin_load", loading)
        patch.setattr(early, "begin", beginning)

    def shared(self, tokens: list[int], copies: Any) -> tuple[Answer, FinishedReport]:
        self.vllm.forget_blocks()  # or they would be copied from there
        return self.vllm.shared(tokens, copies)


@pytest.fixture
def piped(vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Piped]:
    with monkeypatch.context() as patch:
        made = Piped(vllm, patch)
        yield made
        vllm.check_idle()
        made.used.transfers.close()


def test_each_layer_is_there_when_it_is_read(piped: Piped, text: Texts, copies: Copies) -> None:
    """At its position and moved; the pass waits for some of the layers."""
    vllm, tokens = piped.vllm, text(600, 31)
    donor = vllm.store(tokens)
    answer, event = piped.shared(tokens, copies(donor, *SCATTERED))
    assert answer.distance(vllm.plain(tokens)) <= LIMIT
    assert (event.decision, event.used, event.num_computed) == ("approx", (0, 1, 2, 3, 4), 61)
    assert piped.waits > 1
    assert event.stage_seconds.keys() >= {"pass", "hidden", "waited"}


@pytest.mark.parametrize("how", ["by attention", "briefly", "by place"])
def test_repairs_are_chosen_as_if_the_load_had_arrived(
    vllm: Vllm,
    text: Texts,
    copies: Copies,
    monkeypatch: pytest.MonkeyPatch,
    num_brief: Callable[[], int],
    how: str,
) -> None:
    """
    The probes are computed over their own copies, which arrive layer by layer and are put back. Briefly: both
    passes begin before the last layer is there.
    """
    tokens, can_listen = text(600, 36), how != "by place"
    made = scene(vllm.store(tokens), tokens, text, copies, is_brief=how == "briefly")
    with monkeypatch.context() as patch:
        vllm.worker.use(vllm.worker.attached, can_listen=can_listen)
        vllm.forget_blocks()
        late_answer, late = made.ask(vllm)
        vllm.forget_blocks()
        piped = Piped(vllm, patch, can_listen=can_listen)
        early_answer, early = made.ask(vllm)
        assert early.repaired == late.repaired
        assert early_answer.distance(late_answer) <= LIMIT
        assert early.stage_seconds.keys() >= {"pass", "hidden", "waited"}
        assert "hidden" not in late.stage_seconds
        assert (piped.waits > 1, num_brief() > 0) == (True, how == "briefly")
        vllm.check_idle()
        piped.used.transfers.close()
    vllm.worker.use(vllm.worker.attached, can_listen=True)


def test_without_waiting_the_answer_would_be_another(
    piped: Piped, text: Texts, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the test above can fail."""
    from kvshare.vllm_connector.worker.layer_arrivals import LayerArrivals

    vllm, tokens = piped.vllm, text(600, 32)
    donor = vllm.store(tokens)
    monkeypatch.setattr(LayerArrivals, "wait_for", lambda *_: None)
    answer, _ = piped.shared(tokens, copies(donor, *SCATTERED))
    plain = vllm.plain(tokens)
    assert answer.tokens != plain.tokens or answer.distance(plain) > 100 * LIMIT


@pytest.mark.parametrize("layer", [0, 2])
def test_a_sum_that_is_wrong_after_the_pass_has_read_it_is_computed_by_vllm(
    piped: Piped, text: Texts, copies: Copies, layer: int
) -> None:
    """The whole prompt: nothing of the pass is used or stored."""
    import torch

    vllm, tokens = piped.vllm, text(600, 33 + layer)
    donor = vllm.store(tokens)
    with torch.inference_mode():
        for stored in vllm.worker.attached.store.find([s.segment_id for s in donor.stored]).values():
            stored.rows[:, layer] += 1.0
    answer, event = piped.shared(tokens, copies(donor, *SCATTERED))
    assert answer.distance(vllm.plain(tokens)) <= LIMIT
    assert event.num_computed == 600
    assert not event.stage_seconds.keys() & {"pass", "hidden"}
    assert piped.waits > 1
