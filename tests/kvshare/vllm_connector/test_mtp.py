"""
Models with a layer that drafts (MTP), of the kinds that vLLM's recipes serve with it, in real vLLM: rows of
that layer after a shared prefill, and drafts. Tiny ones with random weights; test_heads.py has one that fits.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvshare_lab.vllm.kinds import DRAWN
from tests.kvshare.vllm_connector.compared_rows import errors, rows_of

if TYPE_CHECKING:
    from kvshare.vllm_protocol.messages import WireCopy
    from tests.kvshare.vllm_connector.in_process_vllm import Checkpoint, Copies, Start, Texts, Vllm

pytestmark = pytest.mark.long

LIMIT = 1e-4  # of float32 rows and log-probabilities
CLEARLY = 1e-2  # of rows that differ
SCATTERED = ((0, 100), (130, 300), (301, 500), (520, 590))
MTP = {"method": "mtp", "num_speculative_tokens": 2}
KINDS = ("ernie4-5-moe", "glm4-moe", "hy-v3")


@pytest.fixture(scope="module", params=KINDS)
def model(
    request: pytest.FixtureRequest, checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    from kvshare_lab.vllm.mtp import add_mtp_layer

    folder = tmp_path_factory.mktemp("mtp") / request.param
    shutil.copytree(checkpoint(request.param), folder)
    return add_mtp_layer(folder)


@pytest.fixture
def vllm(model: Path, start: Start) -> Iterator[Vllm]:
    drawn = {"load_format": "dummy", "trust_remote_code": True} if model.name in DRAWN else {}
    machine = start(model, speculative_config=MTP, **drawn)
    info = machine.side.info()
    assert (info.refusals, info.passing, info.speculation) == ((), "", "mtp")
    yield machine
    machine.check_idle()


def test_rows_after_a_shared_prefill_are_those_of_a_full_one(vllm: Vllm, text: Texts, copies: Copies) -> None:
    """From vLLM's blocks, and from host memory."""
    tokens = text(600)
    donor = vllm.store(tokens)
    expected = rows_of(vllm, tokens)
    for _ in range(2):
        assert (errors(expected, rows_of(vllm, tokens, copies(donor, *SCATTERED))) <= LIMIT).all()
        vllm.forget_blocks()


def test_the_last_row_of_a_copy_is_computed_for_the_token_that_follows_here(
    vllm: Vllm, text: Texts, copies: Copies
) -> None:
    tokens, place = text(600, 1), 300
    donor = vllm.store(tokens)
    known, edited = rows_of(vllm, tokens), tokens[:place] + text(200, 2)
    expected = rows_of(vllm, edited)
    assert errors(known, expected)[-1, place - 1] > CLEARLY
    assert (errors(expected, rows_of(vllm, edited, copies(donor, (0, place)))) <= LIMIT).all()


def test_drafts_are_those_of_a_full_prefill_and_a_loss_is_seen_in_them(
    vllm: Vllm, text: Texts, copies: Copies
) -> None:
    tokens = text(600, 3)
    donor = vllm.store(tokens)
    expected = drafted(vllm, tokens)
    assert len(expected) > 5
    assert drafted(vllm, tokens, copies(donor, *SCATTERED)) == expected
    *_, layer = vllm.worker.attached.cache.layers.values()
    layer.kv_cache.zero_()
    assert drafted(vllm, tokens, copies(donor, *SCATTERED)) != expected


def test_layers_without_kv_of_their_own_draft_as_after_a_full_prefill(
    start: Start, checkpoint: Checkpoint, text: Texts, copies: Copies, tmp_path: Path
) -> None:
    """Gemma 4's attend to the target's KV, so nothing of theirs is stored. Of other KV they draft others."""
    from kvshare_lab.vllm.mtp import write_assistant

    target = checkpoint("gemma4")
    drafts = {**MTP, "model": str(write_assistant(target, tmp_path / "assistant"))}
    vllm = start(target, speculative_config=drafts, disable_hybrid_kv_cache_manager=True)
    info = vllm.side.info()
    assert (info.refusals, info.passing, info.speculation) == ((), "", "mtp")
    tokens = text(600, 4)
    donor = vllm.store(tokens)
    expected = drafted(vllm, tokens)
    for _ in range(2):
        assert drafted(vllm, tokens, copies(donor, *SCATTERED)) == expected
        vllm.forget_blocks()
    vllm.check_idle()


def drafted(vllm: Vllm, tokens: list[int], copied: list[WireCopy] | None = None) -> list[list[int]]:
    """The tokens of an answer, and all that was drafted for it."""
    drafts, update = list[list[int]](), vllm.scheduler.update_draft_token_ids

    def noting(found: Any) -> None:
        drafts.extend(list(each) for each in found.draft_token_ids if each)
        update(found)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm.scheduler, "update_draft_token_ids", noting)
        if copied is None:
            return [vllm.plain(tokens, max_tokens=20).tokens, *drafts]
        return [vllm.shared(tokens, copied, max_tokens=20)[0].tokens, *drafts]
