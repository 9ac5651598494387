"""
Heads that draft from the target's hidden states, in real vLLM: their rows after a shared prefill are those of
a full one wherever the target's are, and their drafts are accepted as often.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from delta_tree import Span
from kvshare.vllm_protocol.messages import WireOrder, WireSpan
from kvshare.vllm_protocol.salts import private_salt

if TYPE_CHECKING:
    import torch

    from kvshare.vllm_protocol.messages import FinishedReport, WireCopy
    from tests.kvshare.vllm_connector.in_process_vllm import Checkpoint, Copies, Start, Texts, Vllm

    Rows = list[list[torch.Tensor]]

LIMIT = 1e-4  # of float32 rows and log-probabilities
CLEARLY = 1e-2  # of rows that differ
SCATTERED = ((0, 100), (130, 300), (301, 500), (520, 590))
NUM_DRAFTS = 3
ENOUGH = 1.8  # tokens a step, of a full prefill
LEAST = 0.97  # of them, of a shared one


class TestRows:
    """A random head. Rows of all layers are compared; the head's layer is the last one."""

    @pytest.fixture(scope="class", params=["eagle", "eagle3"])  # so that each starts once
    def method(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    @pytest.fixture
    def vllm(
        self, method: str, start: Start, checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Vllm]:
        from kvshare_lab.vllm.heads import write_random_head

        folder = tmp_path_factory.getbasetemp() / f"head-{method}"
        if not folder.exists():
            write_random_head(checkpoint("llama"), folder, method=method)
        machine = start("llama", speculative_config=by_head(method, folder))
        info = machine.side.info()
        assert (info.refusals, info.passing, info.speculation) == ((), "", method)
        assert info.can_move_keys
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
        """V as it was stored, K rotated, as for any layer; but for the last row of the copy."""
        tokens, shift = text(400, 6), 41
        donor = vllm.store(tokens)
        known = rows_of(vllm, tokens)[-1]
        moved = text(shift, 7) + tokens[:350] + text(50, 8)
        keys, values = rows_of(vllm, moved, copies(donor, (0, 350), shift=shift))[-1]
        assert (values[shift : shift + 349] - known[1][:349]).abs().max() <= LIMIT
        assert (values[shift + 349] - known[1][349]).abs().max() > CLEARLY
        assert (keys[shift : shift + 349] - known[0][:349]).abs().max() > CLEARLY
        norms = [rows.square().sum(dim=-1) for rows in (keys[shift : shift + 349], known[0][:349])]
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
    """A model and its exact head, so that almost all drafts of a full prefill are accepted."""

    @pytest.fixture
    def vllm(
        self, start: Start, checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Vllm]:
        from kvshare_lab.vllm.heads import write_exact_pair

        base: Path = tmp_path_factory.getbasetemp()
        model, head = base / "exact-model", base / "exact-head"
        if not head.exists():
            write_exact_pair(checkpoint("llama"), model, head)
        machine = start(model, speculative_config=by_head("eagle", head), num_gpu_blocks_override=26)
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
        """Of moved text too: the KV of the layer that predicts does not depend on the text before it."""
        tokens = text(500, 1)
        donor = vllm.store(tokens)
        edited = text(41, 2) + tokens[:240] + text(10, 3) + tokens[250:490] + text(9, 4)
        copied = copies(donor, (0, 240), (250, 490), shift=41)
        answer, event = vllm.shared(edited, copied, max_tokens=40)
        assert answer.distance(vllm.plain(edited, max_tokens=40)) <= LIMIT
        assert tokens_a_step(event) >= LEAST * tokens_a_step(full(vllm, edited))

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
        texts = [text(560 + 5 * seed, 20 + seed) for seed in range(5)]
        donors = [vllm.store(tokens) for tokens in texts]
        requests = []
        for tokens, donor in zip(texts, donors, strict=True):
            ticket = vllm.ticket(tokens, copies(donor, (0, 64), (90, 300), (310, 480)))
            requests.append((tokens, ticket, private_salt(ticket.ticket_id)))
        answers = vllm.ask(*requests, max_tokens=90)
        assert preempted
        for tokens, answer in zip(texts, answers, strict=True):
            assert answer.distance(vllm.plain(tokens, max_tokens=90)) <= LIMIT


def by_head(method: str, path: Path) -> dict[str, Any]:
    return {"method": method, "model": str(path), "num_speculative_tokens": NUM_DRAFTS}


def rows_of(vllm: Vllm, tokens: list[int], copies: list[WireCopy] | None = None, **fields: Any) -> Rows:
    """K and V (T, H, D) of each layer when the prompt is computed; with no copies, in full."""
    ticket = vllm.ticket(tokens, copies or (), store=False, **fields)
    name = vllm.begin(tokens, ticket, salt=private_salt(ticket.ticket_id), max_tokens=8)
    engine = vllm.llm.llm_engine
    while not (request := running(vllm, name)).num_output_tokens:
        engine.step()
    (block_ids,) = vllm.scheduler.kv_cache_manager.get_block_ids(request.request_id)
    cache = vllm.worker.attached.cache
    planes = cache.read(tuple(block_ids), Span(0, len(tokens))).planes
    numbers = range(cache.kv_layout.num_layers)
    rows = [[rows.clone() for rows in cache.kv_layout.of_layer(planes, number)] for number in numbers]
    while engine.has_unfinished_requests():
        engine.step()
    vllm.settle()
    assert vllm.finished(ticket).decision == ("approx" if copies else "full")
    return rows


def running(vllm: Vllm, name: str) -> Any:
    """vLLM's request of this name, to which it may have added something."""
    requests = vllm.scheduler.requests.items()
    (found,) = (request for each, request in requests if each == name or each.startswith(f"{name}-"))
    return found


def errors(expected: Rows, got: Rows) -> torch.Tensor:
    """(L, T) The largest difference of each row of each layer, up to where the shorter prompt ends."""
    import torch

    length = min(len(expected[0][0]), len(got[0][0]))
    layers = []
    for right, own in zip(expected, got, strict=True):
        both = zip(right, own, strict=True)
        k, v = ((a[:length] - b[:length]).abs().amax(dim=(1, 2)) for a, b in both)
        layers.append(k.maximum(v))
    return torch.stack(layers)


def lose_rows_of_head(vllm: Vllm) -> None:
    """In all blocks of vLLM's cache."""
    *_, layer = vllm.worker.attached.cache.layers.values()
    layer.kv_cache.zero_()


def full(vllm: Vllm, tokens: list[int]) -> FinishedReport:
    """A full prefill's report; its prompt is found nowhere, and not stored."""
    ticket = vllm.ticket(tokens, store=False)
    vllm.ask((tokens, ticket, vllm.fresh("full")), max_tokens=40)
    return vllm.finished(ticket)


def tokens_a_step(event: FinishedReport) -> float:
    return event.num_answer_tokens / event.num_answer_steps
