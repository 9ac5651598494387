"""
Heads that draft from the target's hidden states, in real vLLM: their rows after a shared prefill are those of
a full one wherever the target's are, and their drafts are accepted as often.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvshare.vllm_protocol.messages import WireOrder, WireSpan
from kvshare.vllm_protocol.salts import private_salt
from tests.kvshare.vllm_connector.compared_rows import errors, rows_of

if TYPE_CHECKING:
    from kvshare.vllm_protocol.messages import FinishedReport, WireCopy
    from tests.kvshare.vllm_connector.in_process_vllm import Checkpoint, Copies, Start, Texts, Vllm

    WithHead = Callable[[str], Vllm]

LIMIT = 1e-4  # of float32 rows and log-probabilities
CLEARLY = 1e-2  # of rows that differ
SCATTERED = ((0, 100), (130, 300), (301, 500), (520, 590))
NUM_DRAFTS = 3
ENOUGH = 1.8  # tokens a step, of a full prefill
LEAST = 0.97  # of them, of a shared one


@pytest.fixture(scope="module", params=["eagle3", "mtp", pytest.param("eagle", marks=pytest.mark.long)])
def method(request: pytest.FixtureRequest) -> str:
    """Of a module, so that each starts once."""
    return str(request.param)


@pytest.fixture(scope="module")
def with_head(start: Start, checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> WithHead:
    """`with_head("eagle")`: a vLLM; the same one as long as the method is."""

    def begin(method: str) -> Vllm:
        folder = tmp_path_factory.getbasetemp() / f"with-{method}"
        if not folder.exists():
            write(method, checkpoint("llama"), folder)
        model, drafts = folder / "model", {"num_speculative_tokens": NUM_DRAFTS, "method": method}
        if method != "mtp":
            drafts["model"] = str(folder / "head")
        # Few blocks, so that some requests are preempted where there are several.
        machine = start(model, speculative_config=drafts, num_gpu_blocks_override=26)
        info = machine.side.info()
        assert (info.refusals, info.passing, info.speculation) == ((), "", method)
        assert info.can_move_keys
        return machine

    return begin


def write(method: str, llama: Path, folder: Path) -> None:
    """A model, and its head: of random weights for EAGLE3, else one that fits."""
    from kvshare_lab.vllm.heads import write_fitting_pair, write_random_head
    from kvshare_lab.vllm.mtp import write_fitting_mtp

    model, head = folder / "model", folder / "head"
    if method == "eagle3":
        write_random_head(llama, head)
        model.symlink_to(llama)
    elif method == "mtp":
        write_fitting_mtp(llama, model)
    else:
        write_fitting_pair(llama, model, head)


class TestRows:
    """Rows of all layers are compared; the head's layer is the last one."""

    @pytest.fixture
    def vllm(self, method: str, with_head: WithHead) -> Iterator[Vllm]:
        machine = with_head(method)
        yield machine
        machine.check_idle()

    def test_copied_and_computed_ones_are_those_of_a_full_prefill(
        self, vllm: Vllm, text: Texts, copies: Copies
    ) -> None:
        """From vLLM's blocks, and from host memory."""
        tokens = text(600)
        donor = vllm.store(tokens)
        expected = rows_of(vllm, tokens)
        for _ in range(2):
            assert (errors(expected, rows_of(vllm, tokens, copies(donor, *SCATTERED))) <= LIMIT).all()
            vllm.forget_blocks()
        answer, event = vllm.shared(tokens, copies(donor, *SCATTERED), max_tokens=20)
        assert (event.decision, event.num_computed) == ("approx", 61)
        assert answer.distance(vllm.plain(tokens, max_tokens=20)) <= LIMIT

    def test_the_last_one_of_a_copy_is_computed_for_the_token_that_follows_here(
        self, vllm: Vllm, text: Texts, copies: Copies
    ) -> None:
        """The donor's row has seen another token; the target's row has not, and stays as it was copied."""
        tokens, place = text(600, 1), 300
        donor = vllm.store(tokens)
        known = rows_of(vllm, tokens)
        edited = tokens[:place] + text(200, 2)
        expected = rows_of(vllm, edited)
        last = [int(each) for each in (errors(known, expected)[-1, :place] > CLEARLY).nonzero()]
        assert last == [place - 1]
        got = rows_of(vllm, edited, copies(donor, (0, place)))
        assert (errors(expected, got) <= LIMIT).all()
        for copied, own in zip(known[:-1], got[:-1], strict=True):
            assert all((mine[:place] == there[:place]).all() for mine, there in zip(own, copied, strict=True))

    def test_placeholders_between_copies_follow_their_own_text(
        self, vllm: Vllm, text: Texts, copies: Copies
    ) -> None:
        """All rows up to the second copy, which has seen other text, are those of a full prefill."""
        tokens = text(600, 3)
        donor = vllm.store(tokens)
        edited = tokens[:200] + text(30, 4) + tokens[230:590] + text(10, 5)
        expected, got = rows_of(vllm, edited), rows_of(vllm, edited, copies(donor, (0, 200), (230, 590)))
        assert (errors(expected, got)[:, :230] <= LIMIT).all()

    def test_moved_text_brings_its_rows(self, vllm: Vllm, text: Texts, copies: Copies) -> None:
        """V as it was stored, K rotated, as for any layer; but for the first and the last row of the copy."""
        tokens, shift = text(400, 6), 41
        donor = vllm.store(tokens)
        known = rows_of(vllm, tokens)[-1]
        moved = text(shift, 7) + tokens[:350] + text(50, 8)
        found = rows_of(vllm, moved, copies(donor, (0, 350), shift=shift))[-1]
        keys, values = (rows[shift : shift + 350] for rows in found)
        assert (values[1:349] - known[1][1:349]).abs().max() <= LIMIT
        assert (values[349] - known[1][349]).abs().max() > CLEARLY
        assert (keys[1:349] - known[0][1:349]).abs().max() > CLEARLY
        norms = [rows[1:349].square().sum(dim=-1) for rows in (keys, known[0])]
        assert (norms[0] - norms[1]).abs().max() <= 100 * LIMIT

    def test_chosen_repairs_are_computed_by_the_head_too(
        self, vllm: Vllm, text: Texts, copies: Copies
    ) -> None:
        """Of a copy that is exact nothing changes, whatever is repaired."""
        tokens = text(600, 9)
        donor = vllm.store(tokens)
        placed = copies(donor, (0, 100), (130, 300), (301, 560))
        stretches = tuple(WireSpan(copy.target_start, copy.target.end) for copy in placed)
        probes = tuple(range(10, 550, 60))
        probes = tuple(p for p in probes if any(s.start <= p < s.end for s in stretches))
        order = WireOrder(stretches=stretches, probes=probes, num_tokens=60, end=len(tokens) - 16)
        got = rows_of(vllm, tokens, placed, order=order)
        assert (errors(rows_of(vllm, tokens), got) <= LIMIT).all()

    def test_a_loss_is_seen_in_the_rows(self, vllm: Vllm, text: Texts, copies: Copies) -> None:
        """Planted: the head's rows are lost in the donor's blocks, and not in host memory."""
        tokens = text(600, 10)
        donor = vllm.store(tokens)
        expected = rows_of(vllm, tokens)
        lose_rows_of_head(vllm)
        lost = errors(expected, rows_of(vllm, tokens, copies(donor, *SCATTERED)))
        assert (lost[:-1] <= LIMIT).all()
        assert (lost[-1, 10:90] > CLEARLY).all()
        vllm.forget_blocks()
        assert (errors(expected, rows_of(vllm, tokens, copies(donor, *SCATTERED))) <= LIMIT).all()

    def test_drafts_are_those_of_a_full_prefill(
        self, vllm: Vllm, text: Texts, copies: Copies, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Accepted or not. With rows that are lost they are others."""
        tokens = text(600, 13)
        donor = vllm.store(tokens)
        drafts, update = list[list[int]](), vllm.scheduler.update_draft_token_ids

        def noting(found: Any) -> None:
            drafts.extend(list(each) for each in found.draft_token_ids if each)
            update(found)

        def drafted(copied: list[WireCopy]) -> list[list[int]]:
            drafts.clear()
            if copied:
                answer, _ = vllm.shared(tokens, copied, max_tokens=30)
            else:
                answer = vllm.plain(tokens, max_tokens=30)
            return [answer.tokens, *drafts]

        monkeypatch.setattr(vllm.scheduler, "update_draft_token_ids", noting)
        expected = drafted([])
        assert len(expected) > 5
        assert drafted(copies(donor, *SCATTERED)) == expected
        lose_rows_of_head(vllm)
        assert drafted(copies(donor, *SCATTERED)) != expected

    def test_rows_of_an_answer_are_stored_with_it(self, vllm: Vllm, text: Texts, copies: Copies) -> None:
        """Drafts were rejected at almost every step of it."""
        tokens = text(300, 11)
        ticket = vllm.ticket(tokens)
        (answer,) = vllm.ask((tokens, ticket, vllm.fresh("tenant")), max_tokens=60)
        donor = vllm.finished(ticket)
        longer = tokens + answer.tokens + text(40, 12)
        end = len(tokens) + len(donor.output_ids)
        got = rows_of(vllm, longer, copies(donor, (0, end)))
        assert (errors(rows_of(vllm, longer), got) <= LIMIT).all()


class TestAcceptance:
    """A head that fits its model, so that almost all drafts of a full prefill are accepted."""

    @pytest.fixture(params=["mtp", pytest.param("eagle", marks=pytest.mark.long)])
    def vllm(self, with_head: WithHead, request: pytest.FixtureRequest) -> Iterator[Vllm]:
        machine = with_head(request.param)
        yield machine
        machine.check_idle()

    def test_of_a_shared_prefill_equals_that_of_a_full_one(
        self, vllm: Vllm, text: Texts, copies: Copies
    ) -> None:
        tokens = text(600)
        donor = vllm.store(tokens)
        for copied in (copies(donor, *SCATTERED), copies(donor, (0, 599))):
            answer, event = vllm.shared(tokens, copied, max_tokens=40)
            assert event.decision == "approx"
            assert answer.distance(vllm.plain(tokens, max_tokens=40)) <= LIMIT
            expected = tokens_a_step(full(vllm, tokens))
            assert expected >= ENOUGH
            assert tokens_a_step(event) >= LEAST * expected

    def test_of_edited_text_equals_that_of_a_full_one(self, vllm: Vllm, text: Texts, copies: Copies) -> None:
        """Of moved text, too: the KV of the layer that predicts does not depend on the text before it."""
        shared, computed = [], []
        for seed in range(100, 120, 5):
            tokens = text(500, seed)
            donor = vllm.store(tokens)
            begin, middle, end = text(41, seed + 1), text(10, seed + 2), text(9, seed + 3)
            edited = begin + tokens[:240] + middle + tokens[250:490] + end
            answer, event = vllm.shared(edited, copies(donor, (0, 240), (250, 490), shift=41), max_tokens=40)
            assert answer.distance(vllm.plain(edited, max_tokens=40)) <= LIMIT
            shared.append(event)
            computed.append(full(vllm, edited))
        expected = tokens_a_step(*computed)
        assert expected >= ENOUGH
        assert tokens_a_step(*shared) >= LEAST * expected

    def test_the_loss_of_the_rows_of_a_head_is_seen(self, vllm: Vllm, text: Texts, copies: Copies) -> None:
        """A planted one. The answer is right all the same."""
        tokens = text(600, 5)
        donor = vllm.store(tokens)
        expected = tokens_a_step(full(vllm, tokens))
        lose_rows_of_head(vllm)
        answer, event = vllm.shared(tokens, copies(donor, (0, 599)), max_tokens=40)
        assert tokens_a_step(event) < LEAST * expected
        assert answer.distance(vllm.plain(tokens, max_tokens=40)) <= LIMIT

    def test_preemption_while_there_are_drafts_and_saves_run(
        self, vllm: Vllm, text: Texts, copies: Copies, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        preempted: list[str] = []
        preempt = vllm.scheduler._preempt_request

        def noting(request: Any, *given: Any, **named: Any) -> None:
            preempted.append(request.request_id)
            preempt(request, *given, **named)

        monkeypatch.setattr(vllm.scheduler, "_preempt_request", noting)
        texts = [text(600 + 5 * seed, 20 + seed) for seed in range(5)]
        donors = [vllm.store(tokens) for tokens in texts]
        requests = []
        for tokens, donor in zip(texts, donors, strict=True):
            ticket = vllm.ticket(tokens, copies(donor, (0, 64), (90, 300), (310, 480)))
            requests.append((tokens, ticket, private_salt(ticket.ticket_id)))
        answers = vllm.ask(*requests, max_tokens=60)
        assert preempted
        for tokens, answer in zip(texts, answers, strict=True):
            assert answer.distance(vllm.plain(tokens, max_tokens=60)) <= LIMIT


def lose_rows_of_head(vllm: Vllm) -> None:
    """In all blocks of vLLM's cache."""
    *_, layer = vllm.worker.attached.cache.layers.values()
    layer.kv_cache.zero_()


def full(vllm: Vllm, tokens: list[int]) -> FinishedReport:
    """A full prefill's report; its prompt is found nowhere, and not stored."""
    ticket = vllm.ticket(tokens, store=False)
    vllm.ask((tokens, ticket, vllm.fresh("full")), max_tokens=40)
    return vllm.finished(ticket)


def tokens_a_step(*events: FinishedReport) -> float:
    return sum(event.num_answer_tokens for event in events) / sum(event.num_answer_steps for event in events)
