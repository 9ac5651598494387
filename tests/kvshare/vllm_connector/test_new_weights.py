"""Other weights, or a sleep of vLLM: no segment of the old ones is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.kvshare.vllm_connector.in_process_vllm import Copies, Texts, Vllm

LIMIT = 1e-4
SCATTERED = ((0, 100), (130, 300), (301, 500), (520, 590))


def test_new_weights_drop_everything(vllm: Vllm, text: Texts, copies: Copies) -> None:
    """`reset_prefix_cache(reset_connector=True)`, as after a weight update."""
    tokens = text(600, 50)
    donor = vllm.store(tokens)
    assert vllm.llm.reset_prefix_cache(reset_connector=True)
    assert len(vllm.side.segments) == 0
    _, event = vllm.shared(tokens, copies(donor, *SCATTERED))
    assert event.used == ()


@pytest.mark.parametrize("level", [1, 2])
def test_a_vllm_that_has_slept_shares_again(vllm: Vllm, text: Texts, copies: Copies, level: int) -> None:
    """
    vLLM has the connector drop what is stored. CPUs sleep in name only, so the test overwrites the blocks.

    vLLM 0.33 sends the workers' reports of the start again, which change nothing.
    """
    before, tokens = vllm.side.info(), text(600, 53)
    donor = vllm.store(tokens)
    vllm.core.sleep(level)
    for layer in vllm.worker.attached.cache.layers.values():
        layer.kv_cache.fill_(1e4)
    vllm.core.wake_up()
    vllm.scheduler.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): vllm.worker.handshake})
    _, event = vllm.shared(tokens, copies(donor, *SCATTERED))
    assert event.used == ()
    answer, event = vllm.shared(tokens, copies(vllm.store(tokens), *SCATTERED))
    assert event.decision == "approx"
    assert answer.distance(vllm.plain(tokens)) <= LIMIT
    after = vllm.side.info()
    assert (after.refusals, after.warnings) == (before.refusals, before.warnings)


@pytest.mark.parametrize(
    ("method", "arguments"),
    [("reload_weights", ()), ("reset_weights", ()), ("sleep", (2,)), ("finish_weight_update", ())],
)
def test_whatever_changes_weights_drops_what_is_stored(
    vllm: Vllm, text: Texts, monkeypatch: pytest.MonkeyPatch, method: str, arguments: tuple[int, ...]
) -> None:
    """vLLM's own part is left out: it would zero the model, or asks for an engine that sends weights."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    donor = vllm.store(text(300, 54))
    with monkeypatch.context() as patch:
        patch.setattr(CPUWorker, method, lambda *_: None)
        vllm.llm.collective_rpc(method, args=arguments)
    vllm.llm.collective_rpc("wake_up")
    vllm.plain(text(40, 55))  # reports come with a step
    assert vllm.dropped() >= {segment.segment_id for segment in donor.stored}


def test_reloaded_weights_take_their_segments_with_them(vllm: Vllm, text: Texts, copies: Copies) -> None:
    """Also where nobody resets the connector; the journal tells of them with the next step."""
    tokens = text(600, 51)
    donor, other = vllm.store(tokens), vllm.store(text(300, 52))
    vllm.llm.collective_rpc("reload_weights")
    answer, event = vllm.shared(tokens, copies(donor, *SCATTERED))
    assert event.used == ()
    gone = {segment.segment_id for event in (donor, other) for segment in event.stored}
    assert gone <= set(vllm.dropped())
    assert answer.distance(vllm.plain(tokens)) <= LIMIT
