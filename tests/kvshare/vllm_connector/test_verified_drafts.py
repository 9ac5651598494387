"""
The self-test's part for what drafts, in real vLLM: it compares rows with those of vLLM's own model runner,
and notices planted faults. Then requests pass unshared, and the server says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from tests.kvshare.vllm_connector.test_heads import write
from tests.kvshare.vllm_connector.test_speculation import by_model

if TYPE_CHECKING:
    from kvshare.vllm_connector.metadata import WorkerHandshake
    from tests.kvshare.vllm_connector.in_process_vllm import Checkpoint, Start, Texts, Vllm

    Plant = Callable[[pytest.MonkeyPatch, Vllm], None]

METHODS = ["draft_model", "eagle3", "mtp", pytest.param("eagle", marks=pytest.mark.long)]


@pytest.fixture(scope="module", params=METHODS)
def drafting(
    request: pytest.FixtureRequest,
    start: Start,
    checkpoint: Checkpoint,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[str, Vllm]:
    return request.param, started(request.param, start, checkpoint, tmp_path_factory)


def started(
    method: str, start: Start, checkpoint: Checkpoint, folders: pytest.TempPathFactory, **options: Any
) -> Vllm:
    """As test_heads.py and test_speculation.py start it."""
    if method == "draft_model":
        return start("llama", speculative_config=by_model(checkpoint("llama")), **options)
    folder = folders.getbasetemp() / f"with-{method}"
    if not folder.exists():
        write(method, checkpoint("llama"), folder)
    drafts: dict[str, Any] = {"num_speculative_tokens": 3, "method": method}
    if method != "mtp":
        drafts["model"] = str(folder / "head")
    return start(folder / "model", speculative_config=drafts, num_gpu_blocks_override=26, **options)


def verified(vllm: Vllm) -> WorkerHandshake:
    """What another worker over the models and the blocks of this vLLM finds."""
    from kvshare.vllm_connector.speculation import draft_model_of
    from kvshare.vllm_connector.worker.models import Models
    from kvshare.vllm_connector.worker.runner_prefill import RunnerPrefill
    from kvshare.vllm_connector.worker.worker import ConnectorWorker

    given, own = vllm.worker._start, vllm.core.model_executor.driver_worker.worker
    worker = ConnectorWorker(given.config, given.settings, given.spec, given.layer_names)
    runner = own.model_runner
    worker.attach_model(Models(runner.get_model(), draft_model_of(runner), prefill=RunnerPrefill(own)))
    worker.close()
    assert worker.handshake is not None
    return worker.handshake


def test_rows_are_verified_and_the_runner_serves_on(drafting: tuple[str, Vllm], text: Texts) -> None:
    """Between requests, too: its own prompt leaves nothing behind."""
    _, vllm = drafting
    expected = vllm.plain(text(300), max_tokens=12)
    handshake = verified(vllm)
    assert (handshake.unsupported, handshake.unverified, handshake.can_move_keys) == ((), "", True)
    assert vllm.plain(text(300), max_tokens=12).distance(expected) <= 1e-4


def without_rows(patch: pytest.MonkeyPatch, _: Vllm) -> None:
    """Our pass leaves out what drafts."""
    patch.setattr("kvshare.vllm_connector.worker.draft_pass.DraftPass.compute", lambda *_: None)


def of_the_runner_are_lost(patch: pytest.MonkeyPatch, vllm: Vllm) -> None:
    """vLLM writes none, as where a batch is too long for its drafter."""
    runner = vllm.core.model_executor.driver_worker.worker.model_runner
    patch.setattr(runner, "_input_fits_in_drafter", lambda _: False)


def at_other_positions(patch: pytest.MonkeyPatch, _: Vllm | None = None) -> None:
    from kvshare.vllm_connector.worker.draft_pass import DraftPass, DraftRows

    rows = DraftPass.rows

    def later(self: DraftPass, *given: Any) -> DraftRows:
        found = rows(self, *given)
        return DraftRows(found.token_ids, found.positions + 1, found.kept)

    patch.setattr(DraftPass, "rows", later)


def of_its_own_token(patch: pytest.MonkeyPatch, _: Vllm) -> None:
    """A head reads the token at its position, and not the one that follows."""
    from kvshare.vllm_connector.worker import draft_pass

    def own_ids(runs: Any) -> Any:
        import numpy as np

        each = [run.token_ids[run.span.start : run.span.end] for run in runs]
        return np.concatenate(each, dtype=np.int32)

    patch.setattr(draft_pass, "following_ids", own_ids)


def of_other_states(patch: pytest.MonkeyPatch, _: Vllm) -> None:
    from kvshare.vllm_connector.worker.draft_pass import DraftPass

    states = DraftPass._states
    patch.setattr(DraftPass, "_states", lambda self, output: states(self, output).roll(1, dims=0))


def not_computed_at_ends(patch: pytest.MonkeyPatch, _: Vllm) -> None:
    """A head leaves the last row of each copy as it is."""
    from kvshare.vllm_connector.worker.partial_forward import PartialForward

    compute = PartialForward.compute

    def without_ends(self: PartialForward, runs: Any, **named: Any) -> None:
        from dataclasses import replace

        from delta_tree import Span

        own = [replace(run, span=Span(run.span.start + len(run.kept), run.span.end), kept=()) for run in runs]
        compute(self, own, **named)

    patch.setattr(PartialForward, "compute", without_ends)


ANY: list[Plant] = [without_rows, of_the_runner_are_lost, at_other_positions]
OF_HEADS: list[Plant] = [of_its_own_token, of_other_states, not_computed_at_ends]
BETWEEN_PASSES: list[Plant] = [without_rows, of_other_states]  # our own passes differ: seen before


@pytest.mark.parametrize("plant", [*ANY, *OF_HEADS])
def test_a_planted_fault_is_seen(
    drafting: tuple[str, Vllm], plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, vllm = drafting
    if method == "draft_model" and plant in OF_HEADS:
        pytest.skip("a draft model has no such part")
    with monkeypatch.context() as patch:
        plant(patch, vllm)
        handshake = verified(vllm)
    if plant in BETWEEN_PASSES:
        assert handshake.unsupported == ("partial attention does not give the KV of a full prefill",)
        return
    assert handshake.unsupported == ()
    assert "are off by" in handshake.unverified
    assert ("at ends" in handshake.unverified) == (plant is not_computed_at_ends)


def test_a_runner_that_cannot_be_asked_is_not_verified(
    drafting: tuple[str, Vllm], monkeypatch: pytest.MonkeyPatch, text: Texts
) -> None:
    """And vLLM serves on."""
    from kvshare.vllm_connector.worker import runner_prefill

    _, vllm = drafting

    def another_vllm(*_: object, **__: object) -> None:
        raise TypeError("NewRequestData: an unexpected argument")

    with monkeypatch.context() as patch:
        patch.setattr(runner_prefill, "NewRequestData", another_vllm)
        handshake = verified(vllm)
    assert handshake.unsupported == ()
    assert "TypeError: NewRequestData: an unexpected argument" in handshake.unverified
    assert len(vllm.plain(text(300), max_tokens=12).tokens) == 12


def test_rows_of_what_drafts_that_are_not_copied_are_seen(
    drafting: tuple[str, Vllm], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the tests of copies, which are of all layers."""
    from kvshare.vllm_connector.worker import copy_test

    _, vllm = drafting
    make, (*_, layer) = copy_test.make, vllm.worker.attached.cache.layers.values()

    def losing(work: Any) -> None:
        make(work)
        if "load" in type(work).__name__.lower():
            layer.kv_cache.zero_()

    with monkeypatch.context() as patch:
        patch.setattr(copy_test, "make", losing)
        handshake = verified(vllm)
    assert handshake.unverified == ""
    assert "loaded rows are not those that were saved" in str(handshake.unsupported)


def test_an_unverified_start_leaves_requests_unshared(
    start: Start,
    checkpoint: Checkpoint,
    tmp_path_factory: pytest.TempPathFactory,
    text: Texts,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One line of the log says what was found and what to do; `kvshare doctor` shows the same words."""
    from kvshare.vllm_connector.scheduler import lifecycle

    monkeypatch.setattr(lifecycle, "log", logging.getLogger("here"))  # vLLM takes handlers off its own
    with monkeypatch.context() as patch:
        at_other_positions(patch)
        vllm = started("mtp", start, checkpoint, tmp_path_factory, max_num_seqs=7)
    info = vllm.side.info()
    assert (info.shares, info.refusals, info.speculation) == (False, (), "mtp")
    assert "did not verify the KV of what drafts (mtp) under model runner V1" in info.passing
    assert "without --speculative-config" in info.passing
    (line,) = [record.getMessage() for record in caplog.records if record.name == "here"]
    assert line == f"kvshare: requests pass unshared: {info.passing}"
    tokens = text(300)
    ticket = vllm.ticket(tokens)
    first, again = (vllm.ask((tokens, ticket, "tenant"), max_tokens=8)[0] for _ in range(2))
    assert first.distance(again) <= 1e-4
    assert vllm.events() == ()
    assert not vllm.scheduler.has_requests()
